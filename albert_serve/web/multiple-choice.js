// The form and the answers of multiple choice.

import { showBars } from './bars.js';
import { element, percent } from './elements.js';
import { linesOf, requestOf } from './service.js';

export function multipleChoice(section, _info, _running, examples) {
  const fields = section.querySelector('form').elements;
  return {
    name: 'multiple-choice',
    examples,
    fill: ({ inputs: { context, question, choices } }) => {
      fields.context.value = context;
      fields.question.value = question ?? '';
      fields.choices.value = choices.join('\n');
    },
    read: () => requestOf(inputsOf(fields), fields.truncate.checked ? { truncation: true } : {}),
    call: ({ inputs, parameters = {} }) => ({ method: 'multiple_choice', given: [inputs], options: parameters }),
    show: (scores, _request, place) => show(scores, place),
  };
}

function inputsOf({ context, question, choices }) {
  const asked = question.value.trim() ? { question: question.value } : {};
  return { context: context.value, ...asked, choices: linesOf(choices.value) };
}

/** Show all choices, the best first. */
function show(scores, place) {
  if (!place.hasChildNodes()) place.append(element('ol', { class: 'bars named' }));
  showBars(place.firstElementChild, scores.map(({ label, score }) => ({ label, score, width: score })));
  const [best] = scores;
  return `${best.label}, ${percent(best.score)}`;
}
