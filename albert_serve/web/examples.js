// The examples of a panel: those of the model's manifest, or some that fit any model of English.

import { isSentiment } from './text-classification.js';

const NUM_EXAMPLES = 5;
const MAX_LABEL = 48;

/** The first examples of a task, as {label, inputs}; `general` are those for any model, by kind. */
export function examplesOf(task, general) {
  const isOther = task.name === 'text-classification' && !isSentiment(task.labels);
  const examples = task.examples ?? ((!isOther && general[task.name]) || general.neutral[task.name]);
  return examples.slice(0, NUM_EXAMPLES).map(({ label, inputs }) => ({ label: label ?? beginning(inputs), inputs }));
}

function beginning(inputs) {
  const text = inputs.question || (inputs.text ?? inputs.sentences?.[0] ?? inputs.context ?? inputs);
  return text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL).trimEnd()}…` : text;
}
