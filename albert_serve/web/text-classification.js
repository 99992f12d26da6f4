// The form and the answers of text classification.

import { showBars } from './bars.js';
import { element, percent } from './elements.js';
import { requestOf } from './service.js';

const NUM_SHOWN = 5;

export function textClassification(section, info, _running, examples) {
  const { labels, problem_type, heads } = info.tasks.find((task) => task.name === 'text-classification');
  const fields = section.querySelector('form').elements;
  offerHeads(fields.head, heads ?? []);
  if (isSentiment(labels)) {
    section.querySelector('[data-title]').textContent = 'Classify the sentiment of a text';
  }
  return {
    name: 'text-classification',
    title: isSentiment(labels) ? 'Sentiment' : 'Classification',
    examples,
    fill: ({ inputs }) => {
      fields.head.selectedIndex = heads ? 0 : -1;
      fields.text.value = inputs.text ?? inputs;
      fields.text_pair.value = inputs.text_pair ?? '';
    },
    read: () => requestOf(inputsOf(fields), parametersOf(fields)),
    call: ({ inputs, parameters = {} }) => ({ method: 'text_classification', given: [inputs], options: parameters }),
    show: ([scores], { parameters = {} }, place) => {
      const head = heads?.find(({ name }) => name === parameters.head);
      return show(scores, head ? head.problem_type : problem_type, place);
    },
  };
}

/** Let the reader choose among the classifiers of a model that has several, the default one first. */
function offerHeads(choice, heads) {
  choice.append(...heads.map(({ name }) => element('option', {}, name)));
  choice.closest('label').hidden = heads.length < 2;
}

function parametersOf({ head, truncate }) {
  return { ...(head.selectedIndex > 0 ? { head: head.value } : {}), ...(truncate.checked ? { truncation: true } : {}) };
}

function inputsOf({ text, text_pair }) {
  return text_pair.value ? { text: text.value, text_pair: text_pair.value } : text.value;
}

/** Whether the labels are those of a sentiment, which the shipped examples are about. */
export function isSentiment(labels) {
  return (labels ?? []).some((label) => label.toLowerCase() === 'positive');
}

/** Show the best labels, and where there are more a button that shows all. */
function show(scores, problemType, place) {
  const hasShares = problemType !== 'regression';
  const rows = scores.map(({ label, score }) => ({ label: breakable(label), score, width: hasShares ? score : null }));
  if (!place.hasChildNodes()) {
    const more = element('button', { type: 'button', class: 'quiet more', 'aria-expanded': 'false' });
    place.append(element('ol', { class: 'bars named' }), more);
  }
  const [list, more] = place.children;
  const refresh = () => {
    const isWhole = more.getAttribute('aria-expanded') === 'true';
    more.textContent = isWhole ? `Show the best ${NUM_SHOWN}` : `Show all ${rows.length} labels`;
    showBars(list, isWhole ? rows : rows.slice(0, NUM_SHOWN));
  };
  more.hidden = rows.length <= NUM_SHOWN;
  more.onclick = () => {
    more.setAttribute('aria-expanded', String(more.getAttribute('aria-expanded') !== 'true'));
    refresh();
  };
  refresh();
  const [best] = scores;
  return `${best.label}, ${hasShares ? percent(best.score) : best.score.toFixed(3)}`;
}

/** A label that wraps after the signs by which programs join words. */
function breakable(label) {
  const parts = label.split(/(?<=[_\-/.:])/);
  return element('span', {}, ...parts.flatMap((part) => [part, element('wbr')]));
}
