// The form and the answers of question answering.

import { showBars } from './bars.js';
import { element, percent } from './elements.js';
import { requestOf } from './service.js';

const NO_ANSWER = 'no answer in this text';

export function questionAnswering(section, info, _running, examples) {
  const fields = section.querySelector('form').elements;
  const { null_score_diff_threshold } = info.tasks.find((task) => task.name === 'question-answering');
  const byDefault = (null_score_diff_threshold ?? null) !== null;
  fields.handle_impossible_answer.checked = byDefault;
  return {
    name: 'question-answering',
    examples,
    fill: ({ inputs }) => {
      fields.question.value = inputs.question;
      fields.context.value = inputs.context;
    },
    read: () => requestOf({ question: fields.question.value, context: fields.context.value }, parametersOf(fields, byDefault)),
    call: ({ inputs, parameters = {} }) => ({ method: 'question_answering', given: [inputs], options: parameters }),
    show: (answer, request, place) => show([answer].flat(), request.inputs.context, place),
  };
}

function parametersOf(fields, byDefault) {
  const parameters = {};
  const top_k = fields.top_k.valueAsNumber;
  if (!Number.isNaN(top_k) && top_k !== 1) parameters.top_k = top_k;
  const { checked } = fields.handle_impossible_answer;
  if (checked !== byDefault) parameters.handle_impossible_answer = checked;
  return parameters;
}

/** Show the passage with the chosen answer marked, and the answers; a bar is relative to the best. */
function show(answers, context, place) {
  if (!place.hasChildNodes()) place.append(element('blockquote', { class: 'passage' }), element('ol', { class: 'bars long' }));
  const [passage, list] = place.children;
  const best = Math.max(...answers.map(({ score }) => score));
  const rows = answers.map(({ answer, score }) => ({
    label: answer || element('i', {}, NO_ANSWER), score, width: best > 0 ? score / best : 0,
  }));
  const choose = (index) => highlight(passage, context, answers[index]);
  showBars(list, rows, { onChoose: choose, chosen: 0 });
  choose(0);
  const [{ answer, score }] = answers;
  return `${answer || NO_ANSWER}, ${percent(score)}`;
}

function highlight(passage, context, { start, end }) {
  const characters = Array.from(context); // places count code points
  const part = (from, to) => characters.slice(from, to).join('');
  if (end <= start) {
    passage.replaceChildren(context);
    return;
  }
  const mark = element('mark', {}, part(start, end));
  passage.replaceChildren(part(0, start), mark, part(end));
  passage.scrollTop = mark.offsetTop - passage.offsetTop - passage.clientHeight / 2;
}
