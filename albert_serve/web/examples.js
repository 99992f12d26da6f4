// The examples of a panel: those of the model's manifest, or some that fit any model of English.

import { isSentiment } from './text-classification.js';

const MAX_LABEL = 48;
const WORD = /\p{L}{3}/u;
const UNNAMED = /^LABEL_\d+$/;

/** The examples of a task, as {label, inputs}; `general` are those for any model, by kind. */
export function examplesOf(task, general) {
  const isOther = task.name === 'text-classification' && !isSentiment(task.labels);
  const own = task.examples ?? (isOther ? labelsOf(task) : general[task.name]);
  const examples = own ?? general.neutral[task.name];
  return examples.map(({ label, inputs }) => ({ label: label ?? beginning(inputs), inputs }));
}

/** The words of a classifier's labels, as texts that it should know; undefined where these are no words. */
function labelsOf({ labels, problem_type: problem }) {
  if (problem === 'regression' || !labels?.every((label) => WORD.test(label) && !UNNAMED.test(label))) return undefined;
  return labels.map((label) => ({ label, inputs: label.replaceAll(/[_-]+/g, ' ') }));
}

function beginning(inputs) {
  const text = inputs.question || (inputs.text ?? inputs.sentences?.[0] ?? inputs.context ?? inputs);
  return text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL).trimEnd()}…` : text;
}
