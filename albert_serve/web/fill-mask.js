// The form and the answers of fill-mask.

import { showBars } from './bars.js';
import { element, percent } from './elements.js';
import { requestOf } from './service.js';

const DEFAULT_TOP_K = 5;

export function fillMask(section, info, _running, examples) {
  const form = section.querySelector('form');
  const fields = form.elements;
  const mask = info.mask_token;
  form.querySelector('[data-action=insert-mask]').addEventListener('click', () => {
    fields.text.focus();
    fields.text.setRangeText(mask, fields.text.selectionStart, fields.text.selectionEnd, 'end');
    form.dispatchEvent(new Event('input', { bubbles: true }));
  });
  return {
    name: 'fill-mask',
    examples: examples.map(({ label, inputs }) => ({ label, text: inputs.replaceAll('[MASK]', mask) })),
    fill: ({ text }) => { fields.text.value = text; },
    read: () => requestOf(fields.text.value, parametersOf(fields)),
    call: ({ inputs, parameters = {} }) => ({ method: 'fill_mask', given: [inputs], options: parameters }),
    show: (answer, request, place) => show(answer, request.inputs.split(mask), place),
  };
}

function parametersOf(fields) {
  const parameters = {};
  const top_k = fields.top_k.valueAsNumber;
  const targets = fields.targets.value.split(',').map((word) => word.trim()).filter(Boolean);
  if (!Number.isNaN(top_k) && top_k !== DEFAULT_TOP_K) parameters.top_k = top_k;
  if (targets.length) parameters.targets = targets;
  if (fields.truncate.checked) parameters.truncation = true;
  return parameters;
}

/** Show the text with its masks filled, and below it a list of bars for each mask. */
function show(answer, pieces, place) {
  const groups = grouped(answer);
  const chosen = groups.map(() => 0);
  const { sentence, lists } = layOut(place, groups.length);
  const refill = () => fillSentence(sentence, pieces, groups.map((group, index) => group[chosen[index]].word));
  groups.forEach((group, index) => {
    const rows = group.map(({ word, score }) => ({ label: visible(word), score, width: score }));
    const onChoose = (row) => {
      chosen[index] = row;
      refill();
    };
    showBars(lists[index], rows, { onChoose, chosen: 0 });
  });
  refill();
  return groups.map(([best]) => `${best.word}, ${percent(best.score)}`).join('; ');
}

/** The elements of an answer: those of the answer before, if it had as many lists. */
function layOut(place, numLists) {
  if (place.querySelectorAll('.bars').length !== numLists) {
    const lists = Array.from({ length: numLists }, () => element('ol', { class: 'bars' }));
    const headed = lists.flatMap((list, index) => [element('h4', {}, `Blank ${index + 1}`), list]);
    place.replaceChildren(element('p', { class: 'filled' }), ...(numLists > 1 ? headed : lists));
  }
  return { sentence: place.querySelector('.filled'), lists: place.querySelectorAll('.bars') };
}

/** One list of {word, score} for each mask. */
function grouped(answer) {
  const groups = Array.isArray(answer[0]) ? answer : [answer];
  return groups.map((group) => group.map(({ token_str, score }) => ({ word: token_str, score })));
}

function fillSentence(sentence, pieces, words) {
  const filled = pieces.slice(1).flatMap((piece, index) => [element('mark', {}, words[index] || ' '), piece]);
  sentence.replaceChildren(pieces[0], ...filled);
}

/** A word as a label; a token of white space alone would be seen as nothing. */
function visible(word) {
  return word.trim() === '' ? '␣' : word;
}
