// The form and the answers of text classification.

import { showBars } from './bars.js';
import { element, percent } from './elements.js';
import { requestOf } from './service.js';

export function textClassification(section, info, _running, examples) {
  const { labels, problem_type } = info.tasks.find((task) => task.name === 'text-classification');
  const fields = section.querySelector('form').elements;
  if (isSentiment(labels)) {
    section.querySelector('[data-title]').textContent = 'Tell the sentiment of a text';
  }
  return {
    name: 'text-classification',
    title: isSentiment(labels) ? 'Sentiment' : 'Classification',
    examples: examples.map(({ label, inputs }) => ({ label, text: inputs })),
    fill: ({ text }) => { fields.text.value = text; },
    read: () => requestOf(inputsOf(fields), fields.truncate.checked ? { truncation: 'truncate' } : {}),
    call: ({ inputs, parameters = {} }) => ({ method: 'text_classification', given: [inputs], options: parameters }),
    show: ([scores], _request, place) => show(scores, problem_type, place),
  };
}

function inputsOf({ text, text_pair }) {
  return text_pair.value ? { text: text.value, text_pair: text_pair.value } : text.value;
}

function isSentiment(labels) {
  return (labels ?? []).some((label) => label.toLowerCase() === 'positive');
}

function show(scores, problemType, place) {
  const hasShares = problemType !== 'regression';
  const rows = scores.map(({ label, score }) => ({ label, score, width: hasShares ? score : null }));
  if (!place.hasChildNodes()) place.append(element('ol', { class: 'bars' }));
  showBars(place.firstElementChild, rows);
  const [best] = scores;
  return `${best.label}, ${hasShares ? percent(best.score) : best.score.toFixed(3)}`;
}
