// What all tasks' panels have in common: examples, sending, the answer or the error, the code.

import { curl, python } from './code.js';
import { duration, element, fromTemplate } from './elements.js';

/**
 * A task's panel.
 *
 * `task` is what differs: `name`; `examples` of {label, ...}; `fill(example)` puts one into the form;
 * `read()` gives the request; `call(request)` the same for the Python client; `show(answer, request,
 * place)` puts an answer into an element and returns it in a few words. `heading` stands above it.
 */
export class Panel {
  #section;
  #service;
  #task;
  #parts;
  #sending = null;
  #request = null;
  #hasRun = false;

  constructor(section, service, task) {
    [this.#section, this.#service, this.#task] = [section, service, task];
    section.querySelector('.answer').append(fromTemplate('answer-template'));
    const find = (selector) => section.querySelector(selector);
    this.#parts = {
      answer: find('.answer'), status: find('[role=status]'), latency: find('.latency'), problem: find('.problem'),
      result: find('.result'), notes: find('.notes'), code: find('pre code'), copy: find('.copy'),
    };
    find('.result-head h3').textContent = task.heading ?? 'Result';
    this.#addExamples(find('.chips'));
    this.#parts.copy.addEventListener('click', () => this.#copy());
    section.addEventListener('submit', (event) => {
      event.preventDefault();
      this.run();
    });
    section.addEventListener('input', () => this.#showCode(this.#task.read()));
    for (const change of ['code-language', 'key-wanted']) {
      document.addEventListener(change, () => this.#showCode(this.#request));
    }
    section.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) this.run();
    });
    task.fill(task.examples[0]);
    this.#showCode(task.read());
  }

  /** Run once, when the panel is first looked at. */
  open() {
    if (!this.#hasRun) this.run();
  }

  /** Send what the form holds; an earlier request that is still under way is dropped. */
  async run(request = this.#task.read()) {
    this.#hasRun = true;
    this.drop();
    const sending = new AbortController();
    this.#sending = sending;
    this.#parts.answer.setAttribute('aria-busy', 'true');
    this.#showCode(request);
    try {
      this.#showAnswer(await this.#service.ask(this.#task.name, request, sending.signal), request);
    } catch (error) {
      if (error.name !== 'AbortError') this.#showProblem(error);
    } finally {
      if (this.#sending === sending) this.#parts.answer.removeAttribute('aria-busy');
    }
  }

  /** Take no answer any more to what was sent. */
  drop() {
    this.#sending?.abort();
  }

  #showCode(request) {
    this.#request = request;
    const language = document.documentElement.dataset.language ?? 'curl';
    this.#parts.code.textContent =
      language === 'curl'
        ? curl(this.#service, this.#task.name, request)
        : python(this.#service, this.#task.call(request));
    for (const button of this.#section.querySelectorAll('[data-language]')) {
      button.setAttribute('aria-pressed', String(button.dataset.language === language));
    }
  }

  #addExamples(place) {
    for (const example of this.#task.examples) {
      const chip = element('button', { type: 'button', class: 'chip' }, example.label);
      chip.addEventListener('click', () => {
        this.#task.fill(example);
        this.run();
      });
      place.append(chip);
    }
  }

  #showAnswer({ answer, time_ms, notes }, request) {
    const { latency, problem, result } = this.#parts;
    problem.hidden = true;
    result.hidden = false;
    const summary = this.#task.show(answer, request, result);
    latency.textContent = duration(time_ms);
    this.#showNotes(notes);
    this.#announce([summary, ...notes].join('. '));
  }

  #showProblem(error) {
    const { latency, problem, result } = this.#parts;
    if (error.status === undefined) throw error; // a fault of this page, not a refusal
    problem.replaceChildren(element('p', { class: 'problem-text' }, error.message), facts(error));
    problem.hidden = false;
    result.hidden = true;
    latency.textContent = '';
    this.#showNotes([]);
    this.#announce('');
    this.#task.clear?.();
    if (error.status === 401) {
      this.#hasRun = false; // the key may come while another panel is shown
      document.dispatchEvent(new CustomEvent('key-wanted', { detail: error }));
    }
  }

  #showNotes(notes) {
    this.#parts.notes.replaceChildren(...notes.map((note) => element('li', {}, note)));
    this.#parts.notes.hidden = notes.length === 0;
  }

  /** Say something to who cannot see it. */
  #announce(text) {
    this.#parts.status.textContent = text;
  }

  async #copy() {
    const { code, copy } = this.#parts;
    copy.textContent = (await copyText(code)) ? 'Copied' : 'Press Ctrl+C';
    this.#announce(copy.textContent);
    setTimeout(() => { copy.textContent = 'Copy'; }, 2000);
  }
}

/** An error's status, type, wait and request, each as the service named it. */
function facts({ status, errorType, requestId, retryAfter }) {
  const told = [
    status && ['Status', status],
    errorType && ['Type', errorType],
    retryAfter && ['Try again after', `${retryAfter} s`],
    requestId && ['Request', requestId],
  ].filter(Boolean);
  const pairs = told.map(([name, value]) => element('div', {}, element('dt', {}, name), element('dd', {}, String(value))));
  return element('dl', { class: 'problem-facts' }, ...pairs);
}

async function copyText(place) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(place.textContent);
      return true;
    } catch {
      // not allowed here: select it, as below
    }
  }
  // Over plain HTTP there is no clipboard but this old way to it.
  getSelection().selectAllChildren(place);
  return document.execCommand('copy');
}
