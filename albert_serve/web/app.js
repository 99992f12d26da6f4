// The page: a tab for each task, the choice of a model, and the API key.

import { element } from './elements.js';
import { Panel } from './panel.js';
import { Service } from './service.js';
import { isSentiment, TASKS } from './tasks.js';

const MAX_LABEL = 48;
const RETRY_AFTER_MS = 2000;

const service = new Service();
const panels = new Map(); // by task name
const find = (selector) => document.querySelector(selector);
const selectedName = () => location.hash.slice(1);
const showCode = () => panels.forEach((panel) => panel.showCode());
const beginning = (text) => (text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL).trimEnd()}…` : text);
let retry = null;

async function start() {
  clearTimeout(retry);
  const { error, info, models, examples } = await service.describe();
  find('#trouble').hidden = !error || error.status === 401; // for 401, the key form is shown
  find('#trouble p').textContent = error?.message;
  if (error?.status === 503) retry = setTimeout(start, RETRY_AFTER_MS);
  if (error || panels.size > 0) return;
  showModels(models);
  for (const name of Object.keys(TASKS)) {
    const described = info.tasks.find((task) => task.name === name);
    if (described) addPanel({ ...TASKS[name], ...described, mask: info.mask_token, card: info.card }, examples);
  }
  for (const field of document.querySelectorAll('[data-info]')) {
    field.textContent = info[field.dataset.info];
    field.hidden = false;
  }
  document.title = `${info.model_id} · albert-serve`;
  if (panels.has(selectedName())) show();
  else location.replace(`#${bestOf(info.tasks.filter(({ name }) => panels.has(name)))}`);
}

/** Show a choice if there are several models. Each model has its own address. */
function showModels({ models, default: first }) {
  const choice = find('#model-choice');
  choice.replaceChildren(...models.map(({ model_id: name }) => element('option', {}, name)));
  choice.value = service.model ?? first;
  choice.hidden = models.length < 2;
}

function addPanel(task, examples) {
  const panel = new Panel(service, task, examplesOf(task, examples));
  panels.set(task.name, panel);
  find('.tabs').append(element('a', { href: `#${task.name}` }, isSentiment(task) ? 'Sentiment' : task.tab));
  find('main').append(panel.section);
}

/** Return the model's examples, or examples for any English model. */
function examplesOf(task, { general, neutral }) {
  const isOther = task.name === 'text-classification' && !isSentiment(task);
  const examples = task.examples ?? (isOther ? null : general[task.name]) ?? neutral[task.name];
  return examples.map(({ label, inputs }) => ({
    label: label ?? beginning(inputs.question || (inputs.text ?? inputs.sentences?.[0] ?? inputs.context ?? inputs)),
    inputs: task.name === 'fill-mask' ? inputs.replaceAll('[MASK]', task.mask) : inputs,
  }));
}

/** Return the task with the best metric. A task without a metric counts as 50 %. */
function bestOf(tasks) {
  const scoreOf = ({ name, quality }) => {
    const value = quality?.percent ?? (name === 'feature-extraction' ? 0 : 50);
    return name === 'sentence-order' ? 2 * (value - 50) : value; // chance is 50 %
  };
  return tasks.reduce((best, task) => (scoreOf(task) > scoreOf(best) ? task : best)).name;
}

/** Show the panel of the address. */
function show() {
  if (!panels.has(selectedName())) return;
  for (const [name, { section }] of panels) section.hidden = name !== selectedName();
  for (const tab of find('.tabs').children) tab.setAttribute('aria-current', tab.hash === location.hash);
  panels.get(selectedName()).run();
}

function requestKey(message) {
  find('.key-why').textContent = message;
  find('#key').hidden = false;
  find('#key-state').hidden = true;
  find('#key-value').focus();
  showCode();
}

find('#key').addEventListener('submit', (event) => {
  event.preventDefault();
  service.useKey(find('#key-value').value.trim());
  event.target.reset();
  event.target.hidden = true;
  find('#key-state').hidden = false;
  if (panels.size === 0) start();
  else panels.get(selectedName()).run();
});

find('#key-state button').addEventListener('click', () => {
  service.useKey(null);
  find('#key-state').hidden = true;
});

find('#model-choice').addEventListener('change', ({ target }) => {
  location.search = new URLSearchParams({ model: target.value });
});

find('#trouble button').addEventListener('click', start);
addEventListener('hashchange', show);
document.addEventListener('key-wanted', ({ detail }) => requestKey(detail));
document.addEventListener('click', ({ target }) => {
  if (!target.dataset.language) return;
  document.documentElement.dataset.language = target.dataset.language;
  showCode();
});

start();
