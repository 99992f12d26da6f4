// The list of sentences, and its coherence.

import { element, fromTemplate, percent } from './elements.js';
import { Gauge, verdict } from './gauge.js';
import { requestOf } from './service.js';
import { SortableList } from './sortable.js';

const SCORE_AFTER_MS = 150;
// A share of the pairs, of which a coin gets half right.
const NEAR_CHANCE = 0.62;

export function sentenceOrder(section, info, running, examples) {
  const { quality } = info.tasks.find((task) => task.name === 'sentence-order');
  const limit = limitOf(quality, info.card?.evaluation?.single_sentence_order_accuracy);
  if (limit) showLimit(section, limit);
  return new SentenceOrder(section, running, examples);
}

/** What the model does not know of order, by its figures; undefined where these are good or missing. */
function limitOf(quality, single) {
  if (single < NEAR_CHANCE) {
    return `Single sentences are barely better than chance: of two neighbouring ones of like lengths, this model
      recognises the order in ${percent(single)} of the cases, where chance is 50%.`;
  }
  if (quality?.metric !== 'accuracy' || quality.percent / 100 >= NEAR_CHANCE) return undefined;
  return `This model does not know sentence order: it tells two texts in order from the same two swapped in
    ${percent(quality.percent / 100)} of the cases, where chance is 50%. Take what it finds as a guess.`;
}

/** Say a limit beside the buttons. */
function showLimit(section, limit) {
  const warning = element('p', { class: 'limit', id: 'order-limit', role: 'note' }, limit.replace(/\s+/g, ' '));
  section.querySelector('.actions').after(warning);
}

class SentenceOrder {
  name = 'sentence-order';
  heading = 'Request';
  examples;
  #list;
  #sortable;
  #gauge;
  #truncate;
  #running;
  #timer = null;
  #moved = '';

  constructor(section, running, examples) {
    const find = (selector) => section.querySelector(selector);
    this.#running = running;
    this.examples = examples.map(({ label, inputs }) => ({ label, sentences: inputs.sentences ?? [inputs.text, inputs.text_pair] }));
    this.#list = find('.sentences');
    this.#truncate = find('[name=truncate]');
    this.#gauge = new Gauge(find('.gauge'));
    this.#sortable = new SortableList(this.#list, (item) => this.#changed(`Now ${placeOf(item)}. `));
    this.#list.addEventListener('input', () => this.#changed());
    this.#list.addEventListener('click', (event) => this.#act(event));
    this.#truncate.addEventListener('change', () => this.#changed());
    find('[data-action=shuffle]').addEventListener('click', () => this.#shuffle());
    find('.add').addEventListener('submit', (event) => this.#add(event));
    watchWidth(this.#list, () => fit(this.#list));
  }

  fill({ sentences }) {
    clearTimeout(this.#timer);
    this.#moved = '';
    this.#list.replaceChildren(...sentences.map(makeSentence));
    fit(this.#list);
    label(this.#list);
  }

  read() {
    return requestOf({ sentences: textsOf(this.#list) }, this.#parameters());
  }

  call({ inputs, parameters = {} }) {
    return { method: 'coherence', given: [inputs.sentences], options: parameters };
  }

  show({ pairs, coherence }) {
    showLinks(this.#list, pairs, [...Array(this.#list.children.length).keys()]);
    return this.#moved + this.#gauge.show(coherence);
  }

  clear() {
    showLinks(this.#list, [], []);
    this.#gauge.show(null);
  }

  #parameters() {
    return this.#truncate.checked ? { truncation: true } : {};
  }

  /** Score the list as it is now, once it has been so for a moment. */
  #changed(moved = '') {
    this.#running.drop();
    this.#moved = moved;
    this.#list.classList.add('stale');
    fit(this.#list);
    label(this.#list);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#running.run(), SCORE_AFTER_MS);
  }

  #act(event) {
    const action = event.target.closest('[data-action]')?.dataset.action;
    if (!action) return;
    const item = event.target.closest('li');
    const place = this.#sortable.items.indexOf(item);
    if (action === 'remove') this.#remove(item);
    else this.#sortable.move(item, action === 'up' ? place - 1 : place + 1);
  }

  #remove(item) {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    next?.querySelector('.grip').focus();
    this.#changed();
  }

  #shuffle() {
    this.#sortable.arrange(shuffled(this.#sortable.items));
    this.#changed();
  }

  #add(event) {
    event.preventDefault();
    event.stopPropagation();
    const { sentence } = event.target.elements;
    this.#list.append(...sentencesIn(sentence.value).map(makeSentence));
    sentence.value = '';
    this.#changed();
  }
}

function makeSentence(text) {
  const item = fromTemplate('sentence-template').firstElementChild;
  item.querySelector('textarea').value = text;
  return item;
}

function textsOf(list) {
  return [...list.querySelectorAll('textarea')].map((field) => field.value);
}

/** Where an item stands, in words. */
function placeOf(item) {
  const siblings = [...item.parentElement.children];
  return `${siblings.indexOf(item) + 1} of ${siblings.length}`;
}

/** Name each sentence's controls by its place. */
function label(list) {
  for (const item of list.children) {
    const name = `sentence ${placeOf(item)}`;
    const find = (selector) => item.querySelector(selector);
    find('.grip').ariaLabel = `Move ${name}`;
    find('textarea').ariaLabel = `Text of ${name}`;
    find('[data-action=up]').ariaLabel = `Move ${name} up`;
    find('[data-action=down]').ariaLabel = `Move ${name} down`;
    find('[data-action=remove]').ariaLabel = `Remove ${name}`;
    // Not `disabled`: a button that has just moved a sentence to the end would lose the focus.
    find('[data-action=up]').ariaDisabled = String(item === list.firstElementChild);
    find('[data-action=down]').ariaDisabled = String(item === list.lastElementChild);
  }
}

/** Above each sentence, the probability that it follows the one before it. */
function showLinks(list, pairs, order) {
  const found = new Map(pairs.map(({ first, second, in_order }) => [`${first} ${second}`, in_order]));
  list.classList.remove('stale');
  [...list.children].forEach((item, index) => {
    const in_order = found.get(`${order[index - 1]} ${order[index]}`) ?? null;
    const value = item.querySelector('.link-value');
    value.textContent = in_order === null ? '–' : percent(in_order);
    value.dataset.verdict = verdict(in_order);
  });
}

/** Each field as high as its text, where the browser does not see to it. */
function fit(list) {
  if (CSS.supports('field-sizing', 'content')) return;
  for (const field of list.querySelectorAll('textarea')) {
    field.style.height = 'auto';
    field.style.height = `${field.scrollHeight}px`;
  }
}

function watchWidth(watched, onChange) {
  let width_px = 0;
  new ResizeObserver(() => {
    if (watched.clientWidth === width_px) return;
    width_px = watched.clientWidth;
    onChange();
  }).observe(watched);
}

/** The sentences of a text, as far as the browser can tell them apart. */
function sentencesIn(text) {
  if (!Intl.Segmenter) return text.trim() ? [text.trim()] : [];
  const segments = [...new Intl.Segmenter('en', { granularity: 'sentence' }).segment(text)];
  return segments.map(({ segment }) => segment.trim()).filter(Boolean);
}

function shuffled(items) {
  const order = [...items];
  for (let last = order.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
  const isSame = order.every((item, index) => item === items[index]);
  return isSame && items.length > 1 ? [...items.slice(1), items[0]] : order;
}
