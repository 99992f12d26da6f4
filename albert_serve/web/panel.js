// A task's panel: its form, the answer or the error, and the request as code.

import { curl, python } from './code.js';
import { element, fromTemplate, percent } from './elements.js';

// Names of input fields. All other fields are parameters.
const INPUTS = ['text', 'text_pair', 'texts', 'question', 'context', 'sentences'];
// A single input of these names is sent without its name.
const BARE = ['text', 'texts'];
const SEPARATORS = { lines: '\n', words: ',' };

export class Panel {
  #service;
  #task;
  #form;
  #numSent = 0;

  /** `task` combines an entry of TASKS with the service's description of the task. */
  constructor(service, task, examples) {
    [this.#service, this.#task] = [service, task];
    this.section = fromTemplate('panel').firstElementChild;
    this.section.id = `panel-${task.name}`;
    this.#form = this.#find('form');
    this.#form.prepend(fromTemplate(task.name));
    this.#find('.options').append(this.#find('.options-body'));
    this.#find('.primary').textContent = task.button;
    this.#find('h3').textContent = task.heading ?? 'Result';
    this.#find('.shortcut').textContent = navigator.platform.startsWith('Mac') ? '⌘ ↵' : 'Ctrl ↵';
    this.#find('.chips').append(...examples.map((example) => this.#makeChip(example)));
    task.setUp?.(this.#form, task);
    this.section.prepend(this.#find('h2'), this.#find('.lead'));
    this.#find('.measured').textContent = qualityText(task.quality);
    this.#form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.run();
    });
    this.#form.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.#form.addEventListener('input', () => this.showCode());
    this.#find('.copy').addEventListener('click', ({ target }) => this.#copy(target));
    this.#fill(examples[0].inputs);
  }

  #find(selector) {
    return this.section.querySelector(selector);
  }

  #makeChip({ label, inputs }) {
    const chip = element('button', { type: 'button', class: 'chip' }, label);
    chip.addEventListener('click', () => {
      this.#fill(inputs);
      this.run();
    });
    return chip;
  }

  /** Put an item of a request into the form. */
  #fill(inputs) {
    const isBare = typeof inputs === 'string' || Array.isArray(inputs);
    const item = isBare ? { text: inputs, texts: inputs } : { sentences: [inputs.text, inputs.text_pair], ...inputs };
    for (const field of this.#form.elements) {
      if (INPUTS.includes(field.name)) field.value = [item[field.name] ?? ''].flat().join('\n');
    }
    this.showCode();
  }

  /** Return the request of the form, without parameters that have their defaults. */
  #read() {
    const item = {};
    const parameters = { ...this.#task.parameters };
    for (const field of this.#form.elements) {
      const value = field.name ? valueOf(field) : undefined;
      if (value !== undefined) (INPUTS.includes(field.name) ? item : parameters)[field.name] = value;
    }
    const [name, ...others] = Object.keys(item);
    const inputs = BARE.includes(name) && others.length === 0 ? item[name] : item;
    return Object.keys(parameters).length ? { inputs, parameters } : { inputs };
  }

  /** Send the form's request. Replies to earlier requests are ignored. */
  async run() {
    const request = this.#read();
    this.#numSent += 1;
    const number = this.#numSent;
    this.#find('.answer').setAttribute('aria-busy', 'true');
    const reply = await this.#service.ask(this.#task.name, request);
    if (number !== this.#numSent) return;
    this.#find('.answer').removeAttribute('aria-busy');
    this.#show(reply, request);
  }

  #show({ error, answer, latency = '', notes = [] }, request) {
    this.#find('.latency').textContent = latency;
    this.#find('.problem').hidden = !error;
    this.#find('.result').hidden = Boolean(error);
    if (error) this.#find('.problem').replaceChildren(element('p', { class: 'problem-text' }, error.message), facts(error));
    else this.#task.show(this.#find('.result'), answer, request, this.#task);
    this.#find('.notes').replaceChildren(...notes.map((note) => element('li', {}, note)));
    this.#find('.notes').hidden = notes.length === 0;
    this.showCode();
  }

  /** Show the request as code, in the language selected for all panels. */
  showCode() {
    const request = this.#read();
    const language = document.documentElement.dataset.language ?? 'curl';
    this.#find('pre code').textContent = { curl, python }[language](this.#service, this.#task.name, request);
    for (const button of this.section.querySelectorAll('[data-language]')) {
      button.setAttribute('aria-pressed', button.dataset.language === language);
    }
  }

  /** Copy the code, in the only way that also works over plain HTTP. */
  #copy(button) {
    getSelection().selectAllChildren(this.#find('pre code'));
    button.textContent = document.execCommand('copy') ? 'Copied' : 'Press Ctrl+C';
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  }
}

/** Return the quality of the model at the task, if its manifest has it. */
function qualityText(quality) {
  if (!quality) return '';
  const { metric, percent: value, count, data } = quality;
  return `On ${data ?? 'labelled data'}: ${metric} ${percent(value / 100)} (${count.toLocaleString('en')} answers).`;
}

/** Return the value of a field, or undefined for the service's default. */
function valueOf(field) {
  if (field.type === 'checkbox') {
    if (field.checked === field.defaultChecked) return undefined;
    return field.value === 'on' ? field.checked : field.value;
  }
  if (field.type === 'number') {
    return field.value === (field.dataset.default ?? field.defaultValue) ? undefined : field.valueAsNumber;
  }
  if (field.type === 'select-one') return field.selectedIndex > 0 ? field.value : undefined;
  const separator = SEPARATORS[field.dataset.list];
  const value = separator ? field.value.split(separator).map((part) => part.trim()).filter(Boolean) : field.value;
  return value.length === 0 && field.closest('.options-body') ? undefined : value;
}

/** Return the status, type, delay and request id of an error. */
function facts({ status, error_type: type, request_id: request, retry_after_s: wait }) {
  const entries = [['Status', status], ['Type', type], ['Try again after', wait && `${wait} s`], ['Request', request]];
  const pairs = entries.filter(([, value]) => value);
  return element('dl', { class: 'problem-facts' }, ...pairs.map(([name, value]) => (
    element('div', {}, element('dt', {}, name), element('dd', {}, value))
  )));
}
