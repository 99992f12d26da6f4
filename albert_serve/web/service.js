// The service of this page, also behind a path prefix.

const WARNINGS_HEADER = 'X-Albert-Warnings';
const TRUNCATED_HEADER = 'X-Albert-Truncated-Tokens';

export class Service {
  /** Whether the service requires a key. Code examples then include it. */
  wantsKey = false;
  #key = null;

  /** The model in the page's address, or null for the default model. */
  model = new URLSearchParams(location.search).get('model');

  root = new URL('.', document.baseURI).href.replace(/\/$/, '');

  /** The base URL of the tasks. */
  get url() {
    return this.model === null ? this.root : `${this.root}/v1/models/${encodeURIComponent(this.model)}`;
  }

  useKey(key) {
    this.#key = key;
  }

  /** Return the model, all models, and example inputs for models without examples. */
  async describe() {
    const files = ['examples', 'neutral-examples'].map((name) => `${this.root}/web/${name}.json`);
    const paths = [`${this.url}/info`, `${this.root}/v1/models`, ...files];
    const replies = await Promise.all(paths.map((path) => this.#send(path)));
    const { error } = replies.find((reply) => reply.error) ?? {};
    const [info, models, general, neutral] = replies.map(({ body }) => body);
    return { error, info, models, examples: { general, neutral } };
  }

  /** Return the answer of a task with its latency and the service's notes, or an error. */
  async ask(task, request) {
    const start_ms = performance.now();
    const { error, body, headers } = await this.#send(`${this.url}/${task}`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(request),
    });
    return error ? { error } : { answer: body, latency: `${Math.ceil(performance.now() - start_ms)} ms`, notes: notesOf(headers) };
  }

  /** Return the JSON of a reply, or the service's error. */
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
    const message = reply.ok ? 'The reply is not JSON.' : body?.error ?? (reply.statusText || 'The service gave no reason.');
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
  return truncated ? [...warnings, `${truncated} tokens were truncated.`] : warnings;
}
