// The tasks in the order of their tabs. Their forms are templates of the page.

import { bars, choosableBars, element, percent } from './elements.js';

const NUM_LABELS_SHOWN = 5;
const NEAR_CHANCE = 0.62;
const GOLDEN_ANGLE = 137.5; // hues of neighbouring numbers differ most

// The cosine of two vectors of length 1, and a number with two decimals without -0.00.
const cosineOf = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
const rounded = (value) => (Math.round(value * 100) / 100 || 0).toFixed(2);

/**
 * Tasks by name: `tab`, `button` and `heading` are texts, `show(target, answer, request, task)` shows an answer in
 * an element, and `setUp(form, task)` adapts the form to the model.
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
function showFilled(target, answer, { inputs }, { mask }) {
  const groups = Array.isArray(answer[0]) ? answer : [answer];
  const pieces = inputs.split(mask);
  const marks = groups.map(([best]) => element('mark', {}, best.token_str || ' '));
  const text = element('p', { class: 'filled' }, pieces[0], ...marks.flatMap((mark, index) => [mark, pieces[index + 1]]));
  const lists = groups.flatMap((group, index) => {
    // A token of white space would be invisible.
    const rows = group.map(({ token_str: word, score }) => ({ label: word.trim() ? word : '␣', figure: percent(score), width: score }));
    const list = choosableBars(rows, '', (row) => { marks[index].textContent = group[row].token_str || ' '; });
    return groups.length > 1 ? [element('h4', {}, `Blank ${index + 1}`), list] : [list];
  });
  target.replaceChildren(text, ...lists);
}

/** Return whether the labels are sentiments, as in the default examples. */
export function isSentiment({ labels }) {
  return (labels ?? []).some((label) => label.toLowerCase() === 'positive');
}

/** Show a choice of classifiers if the model has several, the default first. */
function addHeads(form, task) {
  const { head } = form.elements;
  head.append(...(task.heads ?? []).map(({ name }) => element('option', {}, name)));
  head.closest('label').hidden = head.length < 2;
  if (isSentiment(task)) form.querySelector('h2').textContent = 'Classify the sentiment of a text';
}

/** Show the best labels, and the others on request. Labels wrap after punctuation. */
function showLabels(target, [scores], { parameters }, task) {
  const { problem_type: problem } = task.heads?.find(({ name }) => name === parameters?.head) ?? task;
  const rows = scores.map(({ label, score }) => ({
    label: element('span', {}, ...label.split(/(?<=[_\-/.:])/).flatMap((part) => [part, element('wbr')])),
    ...(problem === 'regression' ? { figure: score.toFixed(3), width: null } : { figure: percent(score), width: score }),
  }));
  const [shown, others] = [rows.slice(0, NUM_LABELS_SHOWN), rows.slice(NUM_LABELS_SHOWN)];
  const more = element('details', { class: 'more' }, element('summary', {}, `Show all ${rows.length} labels`), bars(others, 'named'));
  target.replaceChildren(bars(shown, 'named best-first'), ...(others.length ? [more] : []));
}

function allowNoAnswer({ elements }, { null_score_diff_threshold: threshold }) {
  elements.handle_impossible_answer.defaultChecked = typeof threshold === 'number';
}

/** Show the passage with the chosen answer marked, and the answers; a bar is relative to the best. */
function showAnswers(target, answer, { inputs: { context } }) {
  const answers = [answer].flat();
  const best = Math.max(...answers.map(({ score }) => score));
  const rows = answers.map(({ answer: text, score }) => ({
    label: text || element('i', {}, 'no answer in this text'), figure: percent(score), width: best > 0 ? score / best : 0,
  }));
  const passage = element('blockquote', { class: 'passage' });
  const choose = (index) => highlight(passage, context, answers[index]);
  target.replaceChildren(passage, choosableBars(rows, 'long', choose));
  choose(0);
}

function highlight(passage, context, { start, end }) {
  const characters = Array.from(context); // offsets count code points
  const part = (from, to) => characters.slice(from, to).join('');
  const mark = element('mark', {}, part(start, end));
  passage.replaceChildren(part(0, start), ...(end > start ? [mark] : []), part(end));
  passage.scrollTop = mark.offsetTop - passage.offsetTop - passage.clientHeight / 2;
}

/** Show a note if the model hardly recognises the order of single sentences. */
function addLimit(form, { card }) {
  const single = card?.evaluation?.single_sentence_order_accuracy;
  if (!(single < NEAR_CHANCE)) return;
  form.append(element('p', { class: 'limit', role: 'note' }, `For single sentences, this model is barely better than chance: it recognises the order of ${percent(single)} of neighbouring sentences of similar length (chance: 50%).`));
}

/** Show the coherence of the sentences, and the probability of each pair's order. */
function showOrder(target, { pairs, coherence }, { inputs: { sentences } }) {
  const fill = element('div', { class: 'gauge-fill', 'data-verdict': verdict(coherence) });
  fill.style.width = `${coherence * 100}%`;
  const name = element('span', { class: 'gauge-name' }, 'Coherence');
  const value = element('output', { class: 'gauge-value' }, percent(coherence));
  const links = pairs.map(({ in_order: score }) => element('span', { class: 'link', 'data-verdict': verdict(score) }, percent(score)));
  const items = sentences.map((sentence, index) => element('li', {}, links[index - 1] ?? '', element('p', { class: 'card' }, sentence)));
  target.replaceChildren(
    element('div', { class: 'gauge' }, name, value, element('div', { class: 'gauge-track' }, fill)),
    element('ol', { class: 'sentences' }, ...items),
  );
}

/** Return the style sheet's word for a probability of the order. */
function verdict(probability) {
  if (probability < 0.4) return 'bad';
  return probability > 0.6 ? 'good' : 'even';
}

/** Show the text with its entities and labels marked. The title of a mark has the score. */
function showEntities(target, entities, { inputs }, { labels }) {
  const kinds = [...new Set((labels ?? []).map((label) => label.replace(/^[BIES]-/, '')))];
  const characters = Array.from(inputs); // offsets count code points
  const part = (from, to) => characters.slice(from, to).join('');
  const passage = element('blockquote', { class: 'passage entities' });
  let shown = 0;
  for (const { entity_group: kind, score, start, end } of entities) {
    if (end <= shown) continue; // a word-start token overlaps the first letter
    const from = Math.max(start, shown);
    const mark = element('mark', { title: `${kind}, ${percent(score)}` }, part(from, end), element('span', { class: 'kind' }, kind));
    mark.style.setProperty('--hue', kinds.indexOf(kind) * GOLDEN_ANGLE);
    passage.append(part(shown, from), mark);
    shown = end;
  }
  passage.append(part(shown));
  target.replaceChildren(passage);
}

/** Show the selected text, then the others by similarity. Selecting another text compares with that one. */
function showAlike(target, embeddings, request, task, chosen = 0) {
  const cosines = embeddings.map((embedding) => cosineOf(embedding, embeddings[chosen]));
  const others = [...cosines.keys()].filter((index) => index !== chosen);
  const order = [chosen, ...others.sort((a, b) => cosines[b] - cosines[a])];
  const rows = order.map((index) => ({ label: request.inputs[index], figure: rounded(cosines[index]), width: cosines[index] }));
  target.replaceChildren(choosableBars(rows, 'long alike', (row) => {
    showAlike(target, embeddings, request, task, order[row]);
    target.querySelector('button').focus();
  }));
}
