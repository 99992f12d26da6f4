// The service that this page came from, whatever path it is under.

const WARNINGS_HEADER = 'X-Albert-Warnings';
const TRUNCATED_HEADER = 'X-Albert-Truncated-Tokens';

export class Service {
  /** Whether a key was asked for; examples of code then show where it goes. */
  wantsKey = false;
  #key = null;

  /** The model that the page's address names, or null for the service's default. */
  model = new URLSearchParams(location.search).get('model');

  root = new URL('.', document.baseURI).href.replace(/\/$/, '');

  /** Where the tasks are answered. */
  get url() {
    return this.model === null ? this.root : `${this.root}/v1/models/${encodeURIComponent(this.model)}`;
  }

  useKey(key) {
    this.#key = key;
  }

  /** The model, all models, and examples of inputs for those that have none of their own. */
  async describe() {
    const files = ['examples', 'neutral-examples'].map((name) => `${this.root}/web/${name}.json`);
    const paths = [`${this.url}/info`, `${this.root}/v1/models`, ...files];
    const replies = await Promise.all(paths.map((path) => this.#send(path)));
    const { error } = replies.find((reply) => reply.error) ?? {};
    const [info, models, general, neutral] = replies.map(({ body }) => body);
    return { error, info, models, examples: { general, neutral } };
  }

  /** The answer of a task with its latency and what the service says about it, or an error. */
  async ask(task, request) {
    const start_ms = performance.now();
    const { error, body, headers } = await this.#send(`${this.url}/${task}`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(request),
    });
    return error ? { error } : { answer: body, latency: `${Math.ceil(performance.now() - start_ms)} ms`, notes: notesOf(headers) };
  }

  /** The JSON of a reply, or an error as the service gives it. */
  async #send(url, options = {}) {
    const key = this.#key === null ? {} : { Authorization: `Bearer ${this.#key}` };
    let reply;
    try {
      reply = await fetch(url, { ...options, headers: { Accept: 'application/json', ...key, ...options.headers } });
    } catch {
      return { error: { message: 'The service cannot be reached. Is it still running?' } };
    }
    const { status, headers } = reply;
    const body = await reply.json().catch(() => undefined);
    if (reply.ok && body !== undefined) return { body, headers };
    const message = reply.ok ? 'The reply is not JSON.' : body?.error ?? (reply.statusText || 'No reason was given.');
    if (status === 401) {
      this.wantsKey = true;
      document.dispatchEvent(new CustomEvent('key-wanted', { detail: message }));
    }
    return { error: { ...body, message, status, retry_after_s: headers.get('Retry-After') } };
  }
}

function notesOf(headers) {
  const warnings = JSON.parse(headers.get(WARNINGS_HEADER) ?? '[]');
  const truncated = headers.get(TRUNCATED_HEADER);
  return truncated ? [...warnings, `${truncated} tokens were cut.`] : warnings;
}
