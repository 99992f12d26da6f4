// The service that this page came from, whatever path it is under.

const WARNINGS_HEADER = 'X-Albert-Warnings';
const TRUNCATED_HEADER = 'X-Albert-Truncated-Tokens';

/** A refusal, as the service gave it; `status` is null where there was no reply at all. */
export class ServiceError extends Error {
  constructor(message, { status = null, errorType = null, requestId = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, errorType, requestId, retryAfter });
  }
}

/** The body of a request; parameters that all have their defaults are left out. */
export function requestOf(inputs, parameters) {
  return Object.keys(parameters).length ? { inputs, parameters } : { inputs };
}

/** The texts that were written one a line. */
export function linesOf(text) {
  return text.split('\n').map((line) => line.trim()).filter(Boolean);
}

export class Service {
  /** Whether a key was asked for; examples of code then show where it goes. */
  wantsKey = false;
  #key = null;

  /** The model that the page's address names, or null for the service's default. */
  model = new URLSearchParams(location.search).get('model');

  get root() {
    return new URL('.', document.baseURI).href.replace(/\/$/, '');
  }

  /** Where the tasks are answered. */
  get url() {
    return this.model === null ? this.root : `${this.root}/v1/models/${encodeURIComponent(this.model)}`;
  }

  get hasKey() {
    return this.#key !== null;
  }

  useKey(key) {
    this.#key = key;
  }

  async info() {
    return (await this.#send(`${this.url}/info`, {})).body;
  }

  /** Examples of inputs by task, for models that have none of their own; `neutral` for any labels. */
  async examples() {
    const files = ['examples', 'neutral-examples'].map((name) => this.#send(`${this.root}/web/${name}.json`, {}));
    const [general, neutral] = await Promise.all(files);
    return { ...general.body, neutral: neutral.body };
  }

  /** All models of the service, and which of them is the default. */
  async models() {
    return (await this.#send(`${this.root}/v1/models`, {})).body;
  }

  /** The answer of a task, how long it took, and what the service has to say about it. */
  async ask(task, request, signal) {
    const headers = { 'Content-Type': 'application/json' };
    const sent = { method: 'POST', headers, body: JSON.stringify(request), signal };
    const { body, response, time_ms } = await this.#send(`${this.url}/${task}`, sent);
    return { answer: body, time_ms, notes: notesOf(response) };
  }

  async #send(url, options) {
    const headers = { Accept: 'application/json', ...options.headers };
    if (this.#key !== null) headers.Authorization = `Bearer ${this.#key}`;
    const start_ms = performance.now();
    const { response, text } = await fetchText(url, { ...options, headers });
    const time_ms = performance.now() - start_ms;
    if (response.status === 401) this.wantsKey = true;
    const body = parse(text);
    if (!response.ok) throw refusal(response, body);
    if (body === undefined) {
      throw new ServiceError('The reply is not JSON.', { status: response.status });
    }
    return { body, response, time_ms };
  }
}

async function fetchText(url, options) {
  try {
    const response = await fetch(url, { ...options, credentials: 'same-origin' });
    return { response, text: await response.text() };
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServiceError('The service cannot be reached. Is it still running?');
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function refusal(response, body) {
  const told = typeof body?.error === 'string' ? body.error : response.statusText || 'No reason was given.';
  return new ServiceError(told, {
    status: response.status,
    errorType: body?.error_type ?? null,
    requestId: body?.request_id ?? response.headers.get('X-Request-ID'),
    retryAfter: response.headers.get('Retry-After'),
  });
}

function notesOf(response) {
  const warnings = parse(response.headers.get(WARNINGS_HEADER) ?? '[]') ?? [];
  const truncated = response.headers.get(TRUNCATED_HEADER);
  if (!truncated) return warnings;
  return [...warnings, `${truncated} tokens were cut.`];
}
