// The tasks in the order of their tabs. Their forms are templates of the page.

import { bars, choosableBars, element, percent } from './elements.js';

const NUM_LABELS_SHOWN = 5;
const NEAR_CHANCE = 0.62;
const GOLDEN_ANGLE = 137.5; // hues of neighbouring numbers differ most

// The cosine of two vectors of length 1, and a figure of two decimals, where no zero has a sign.
const cosineOf = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);
const rounded = (value) => (Math.round(value * 100) / 100 || 0).toFixed(2);

/**
 * By name: `tab`, `button` and `heading` are their texts; `show(place, answer, request, task)` puts an answer
 * into an element; `setUp(form, task)` fits the form to the model.
 */
export const TASKS = {
  'fill-mask': { tab: 'Fill mask', button: 'Predict', show: showFilled, setUp: addMaskButton },
  'text-classification': { tab: 'Classification', button: 'Classify', show: showLabels, setUp: addHeads },
  'question-answering': { tab: 'Questions', button: 'Find', show: showAnswers, setUp: allowNoAnswer },
  'sentence-order': { tab: 'Sentence order', button: 'Score', show: showOrder, setUp: addLimit },
  'token-classification': { tab: 'Entities', button: 'Find', show: showEntities },
  'feature-extraction': {
    tab: 'Embeddings', button: 'Compare', heading: 'Cosine similarity', show: showAlike, parameters: { normalize: true },
  },
};

function addMaskButton(form, { mask }) {
  const { text } = form.elements;
  form.querySelector('[data-action=insert-mask]').addEventListener('click', () => {
    text.focus();
    text.setRangeText(mask, text.selectionStart, text.selectionEnd, 'end');
    text.dispatchEvent(new Event('input', { bubbles: true }));
  });
}

/** Show the text with its masks filled, and a list of bars for each mask. */
function showFilled(place, answer, { inputs }, { mask }) {
  const groups = Array.isArray(answer[0]) ? answer : [answer];
  const pieces = inputs.split(mask);
  const marks = groups.map(([best]) => element('mark', {}, best.token_str || ' '));
  const text = element('p', { class: 'filled' }, pieces[0], ...marks.flatMap((mark, index) => [mark, pieces[index + 1]]));
  const lists = groups.flatMap((group, index) => {
    // A token of white space alone would be seen as nothing.
    const rows = group.map(({ token_str: word, score }) => ({ label: word.trim() ? word : '␣', figure: percent(score), width: score }));
    const list = choosableBars(rows, '', (row) => { marks[index].textContent = group[row].token_str || ' '; });
    return groups.length > 1 ? [element('h4', {}, `Blank ${index + 1}`), list] : [list];
  });
  place.replaceChildren(text, ...lists);
}

/** Whether the labels are those of a sentiment, which the shipped examples are about. */
export function isSentiment({ labels }) {
  return (labels ?? []).some((label) => label.toLowerCase() === 'positive');
}

/** Let the reader choose among the classifiers of a model that has several, the default one first. */
function addHeads(form, task) {
  const { head } = form.elements;
  head.append(...(task.heads ?? []).map(({ name }) => element('option', {}, name)));
  head.closest('label').hidden = head.length < 2;
  if (isSentiment(task)) form.querySelector('h2').textContent = 'Classify the sentiment of a text';
}

/** Show the best labels, which wrap after the signs that join words, and the others on request. */
function showLabels(place, [scores], { parameters }, task) {
  const { problem_type: problem } = task.heads?.find(({ name }) => name === parameters?.head) ?? task;
  const rows = scores.map(({ label, score }) => ({
    label: element('span', {}, ...label.split(/(?<=[_\-/.:])/).flatMap((part) => [part, element('wbr')])),
    ...(problem === 'regression' ? { figure: score.toFixed(3), width: null } : { figure: percent(score), width: score }),
  }));
  const [shown, others] = [rows.slice(0, NUM_LABELS_SHOWN), rows.slice(NUM_LABELS_SHOWN)];
  const more = element('details', { class: 'more' }, element('summary', {}, `Show all ${rows.length} labels`), bars(others, 'named'));
  place.replaceChildren(bars(shown, 'named best-first'), ...(others.length ? [more] : []));
}

function allowNoAnswer({ elements }, { null_score_diff_threshold: threshold }) {
  elements.handle_impossible_answer.defaultChecked = typeof threshold === 'number';
}

/** Show the passage with the chosen answer marked, and the answers; a bar is relative to the best. */
function showAnswers(place, answer, { inputs: { context } }) {
  const answers = [answer].flat();
  const best = Math.max(...answers.map(({ score }) => score));
  const rows = answers.map(({ answer: text, score }) => ({
    label: text || element('i', {}, 'no answer in this text'), figure: percent(score), width: best > 0 ? score / best : 0,
  }));
  const passage = element('blockquote', { class: 'passage' });
  const choose = (index) => highlight(passage, context, answers[index]);
  place.replaceChildren(passage, choosableBars(rows, 'long', choose));
  choose(0);
}

function highlight(passage, context, { start, end }) {
  const characters = Array.from(context); // places count code points
  const part = (from, to) => characters.slice(from, to).join('');
  const mark = element('mark', {}, part(start, end));
  passage.replaceChildren(part(0, start), ...(end > start ? [mark] : []), part(end));
  passage.scrollTop = mark.offsetTop - passage.offsetTop - passage.clientHeight / 2;
}

/** Say how little a model knows of the order of single sentences. */
function addLimit(form, { card }) {
  const single = card?.evaluation?.single_sentence_order_accuracy;
  if (!(single < NEAR_CHANCE)) return;
  form.append(element('p', { class: 'limit', role: 'note' }, `Single sentences are barely better than chance: of two neighbouring ones of like lengths, this model recognises the order in ${percent(single)} of the cases, where chance is 50%.`));
}

/** Show the coherence of sentences, and between two of them the probability of their order. */
function showOrder(place, { pairs, coherence }, { inputs: { sentences } }) {
  const fill = element('div', { class: 'gauge-fill', 'data-verdict': verdict(coherence) });
  fill.style.width = `${coherence * 100}%`;
  const name = element('span', { class: 'gauge-name' }, 'Coherence');
  const value = element('output', { class: 'gauge-value' }, percent(coherence));
  const links = pairs.map(({ in_order: share }) => element('span', { class: 'link', 'data-verdict': verdict(share) }, percent(share)));
  const items = sentences.map((sentence, index) => element('li', {}, links[index - 1] ?? '', element('p', { class: 'card' }, sentence)));
  place.replaceChildren(
    element('div', { class: 'gauge' }, name, value, element('div', { class: 'gauge-track' }, fill)),
    element('ol', { class: 'sentences' }, ...items),
  );
}

/** What a probability of being in order says, as a word for the style sheet. */
function verdict(probability) {
  if (probability < 0.4) return 'bad';
  return probability > 0.6 ? 'good' : 'even';
}

/** Show the text with its entities marked, each with its label; the score is in the mark's title. */
function showEntities(place, entities, { inputs }, { labels }) {
  const kinds = [...new Set((labels ?? []).map((label) => label.replace(/^[BIES]-/, '')))];
  const characters = Array.from(inputs); // places count code points
  const part = (from, to) => characters.slice(from, to).join('');
  const passage = element('blockquote', { class: 'passage entities' });
  let shown = 0;
  for (const { entity_group: kind, score, start, end } of entities) {
    if (end <= shown) continue; // of single tokens, the mark of a space has the first letter's place
    const from = Math.max(start, shown);
    const mark = element('mark', { title: `${kind}, ${percent(score)}` }, part(from, end), element('span', { class: 'kind' }, kind));
    mark.style.setProperty('--hue', kinds.indexOf(kind) * GOLDEN_ANGLE);
    passage.append(part(shown, from), mark);
    shown = end;
  }
  passage.append(part(shown));
  place.replaceChildren(passage);
}

/** Show the chosen text and below it the others, the most alike first; any of them can take its place. */
function showAlike(place, embeddings, request, task, chosen = 0) {
  const cosines = embeddings.map((embedding) => cosineOf(embedding, embeddings[chosen]));
  const others = [...cosines.keys()].filter((index) => index !== chosen);
  const order = [chosen, ...others.sort((one, other) => cosines[other] - cosines[one])];
  const rows = order.map((index) => ({ label: request.inputs[index], figure: rounded(cosines[index]), width: cosines[index] }));
  place.replaceChildren(choosableBars(rows, 'long alike', (row) => {
    showAlike(place, embeddings, request, task, order[row]);
    place.querySelector('button').focus();
  }));
}
