// The page: what the service has, a tab for each of its tasks, and its key.

import { element, percent } from './elements.js';
import { examplesOf } from './examples.js';
import { featureExtraction } from './feature-extraction.js';
import { fillMask } from './fill-mask.js';
import { Panel } from './panel.js';
import { questionAnswering } from './question-answering.js';
import { sentenceOrder } from './sentence-order.js';
import { Service } from './service.js';
import { textClassification } from './text-classification.js';
import { tokenClassification } from './token-classification.js';

const TASKS = [
  { name: 'fill-mask', title: 'Fill mask', make: fillMask },
  { name: 'text-classification', title: 'Classification', make: textClassification },
  { name: 'question-answering', title: 'Questions', make: questionAnswering },
  { name: 'sentence-order', title: 'Sentence order', make: sentenceOrder },
  { name: 'token-classification', title: 'Entities', make: tokenClassification },
  { name: 'feature-extraction', title: 'Embeddings', make: featureExtraction },
];
const NO_TASKS = "This page supports none of this model's tasks; see the API reference.";
const NO_SUCH_KEY = 'Keys contain only ASCII letters, digits and symbols. Did you copy the whole key?';
const RETRY_AFTER_MS = 2000;
const NOT_READY = 503;

const service = new Service();
const panels = new Map();
let shown = null;
let retry = null;

async function start() {
  clearTimeout(retry);
  const trouble = document.getElementById('trouble');
  try {
    showModels(await service.models());
    const info = await service.info();
    const examples = await service.examples();
    service.wantsKey ||= info.needs_key === true;
    showInfo(info, examples);
    trouble.hidden = true;
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.status === 401) askForKey(error);
    else showTrouble(trouble, error);
  }
}

function showTrouble(trouble, error) {
  const again = element('button', { type: 'button' }, 'Try again');
  again.addEventListener('click', start);
  trouble.replaceChildren(element('p', {}, error.message), again);
  trouble.hidden = false;
  if (error.status === NOT_READY) retry = setTimeout(start, RETRY_AFTER_MS);
}

function showInfo(info, examples) {
  for (const place of document.querySelectorAll('[data-info]')) {
    place.textContent = info[place.dataset.info];
    place.hidden = false;
  }
  document.title = `${info.model_id} · albert-serve`;
  const known = TASKS.filter(({ name }) => infoOf(name, info) !== undefined);
  if (panels.size === 0) known.forEach((task) => addPanel(task, info, examplesOf(infoOf(task.name, info), examples)));
  document.getElementById('placeholder')?.remove();
  if (known.length === 0) {
    document.getElementById('tabs')?.replaceWith(element('p', { class: 'banner' }, NO_TASKS));
    return;
  }
  show(panels.has(named()) ? named() : bestOf(known, info));
}

/** The task that the model does best, by its figures; one without a figure counts as half right. */
function bestOf(known, info) {
  const figure = ({ name }) => {
    const told = infoOf(name, info).quality?.percent ?? (name === 'feature-extraction' ? 0 : 50);
    return name === 'sentence-order' ? 2 * (told - 50) : told; // by chance it has half
  };
  return known.reduce((best, task) => (figure(task) > figure(best) ? task : best)).name;
}

/** A choice of the models, where there are several; another one is another address of the page. */
function showModels({ models, default: first }) {
  if (models.length < 2) return;
  const choice = document.getElementById('model-choice');
  choice.replaceChildren(...models.map(({ model_id: name }) => element('option', {}, name)));
  choice.value = service.model ?? first;
  choice.hidden = false;
}

document.getElementById('model-choice').addEventListener('change', ({ target }) => {
  const wanted = new URL(location.href);
  wanted.searchParams.set('model', target.value);
  location.assign(wanted);
});

function infoOf(name, info) {
  return info.tasks.find((task) => task.name === name);
}

/** How well the model does a task, where its manifest says so. */
function showQuality(section, quality) {
  if (!quality) return;
  const { metric, percent: value, count, data } = quality;
  const told = `On ${data ?? 'labelled data'}: ${metric} ${percent(value / 100)} (${count.toLocaleString('en')} answers).`;
  section.querySelector('.lead').after(element('p', { class: 'measured' }, told));
}

function addPanel({ name, title, make }, info, examples) {
  const section = document.getElementById(`panel-${name}`);
  const running = {
    run: (request) => panels.get(name).panel.run(request),
    drop: () => panels.get(name).panel.drop(),
  };
  showQuality(section, infoOf(name, info).quality);
  const task = make(section, info, running, examples);
  const panel = new Panel(section, service, task);
  const tab = element('button', { type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': section.id }, task.title ?? title);
  section.setAttribute('aria-labelledby', tab.id);
  tab.addEventListener('click', () => show(name));
  tab.addEventListener('keydown', (event) => moveByKey(event, name));
  document.getElementById('tabs').append(tab);
  panels.set(name, { section, panel, tab });
}

function show(name) {
  shown = name;
  for (const [other, { section, tab }] of panels) {
    section.hidden = other !== name;
    tab.setAttribute('aria-selected', String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
  }
  if (named() !== name) history.replaceState(null, '', `#${name}`);
  panels.get(name).panel.open();
}

function named() {
  return location.hash.slice(1);
}

function moveByKey(event, name) {
  const names = [...panels.keys()];
  const place = names.indexOf(name);
  const { length } = names;
  const wanted = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: length - 1 }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  const other = names[(wanted + length) % length];
  show(other);
  panels.get(other).tab.focus();
}

const keyForm = document.getElementById('key');
const keyState = document.getElementById('key-state');

function askForKey({ message }) {
  keyForm.querySelector('.key-why').textContent = message;
  keyForm.hidden = false;
  keyState.hidden = true;
  keyForm.elements['key-value'].focus();
}

keyForm.addEventListener('submit', (event) => {
  event.preventDefault();
  const field = keyForm.elements['key-value'];
  const key = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    askForKey({ message: NO_SUCH_KEY });
    return;
  }
  service.useKey(key);
  field.value = '';
  keyForm.hidden = true;
  keyState.hidden = false;
  if (panels.size === 0) start();
  else panels.get(shown).panel.run();
});

keyState.querySelector('button').addEventListener('click', () => {
  service.useKey(null);
  keyState.hidden = true;
});

addEventListener('hashchange', () => panels.has(named()) && show(named()));
document.addEventListener('key-wanted', (event) => askForKey(event.detail));
document.addEventListener('click', (event) => {
  const language = event.target.closest?.('[data-language]')?.dataset.language;
  if (!language) return;
  document.documentElement.dataset.language = language;
  document.dispatchEvent(new Event('code-language'));
});

for (const shortcut of document.querySelectorAll('.shortcut')) {
  shortcut.textContent = navigator.platform.startsWith('Mac') ? '⌘ ↵' : 'Ctrl ↵';
}

start();
