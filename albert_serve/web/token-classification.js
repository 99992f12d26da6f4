// The form and the answers of token classification.

import { element, percent } from './elements.js';
import { requestOf } from './service.js';

const NO_ENTITY = 'no entity in this text';
const GOLDEN_ANGLE = 137.5; // hues of neighbouring numbers differ most

export function tokenClassification(section, info, _running, examples) {
  const fields = section.querySelector('form').elements;
  const { labels } = info.tasks.find((task) => task.name === 'token-classification');
  const kinds = [...new Set((labels ?? []).map((label) => label.replace(/^[BIES]-/, '')))];
  return {
    name: 'token-classification',
    examples,
    fill: ({ inputs }) => { fields.text.value = inputs; },
    read: () => requestOf(fields.text.value, fields.strategy.selectedIndex > 0 ? { aggregation_strategy: fields.strategy.value } : {}),
    call: ({ inputs, parameters = {} }) => ({ method: 'token_classification', given: [inputs], options: parameters }),
    show: (entities, { inputs }, place) => show(entities, inputs, kinds, place),
  };
}

/** Show the text with its entities marked, each with its label; the score is in the mark's title. */
function show(entities, text, kinds, place) {
  if (!place.hasChildNodes()) place.append(element('blockquote', { class: 'passage entities' }));
  const characters = Array.from(text); // places count code points
  const part = (from, to) => characters.slice(from, to).join('');
  let shown = 0;
  const pieces = entities.flatMap(({ entity_group: kind, score, start, end }) => {
    if (end <= shown) return []; // of single tokens, the mark of a space has the first letter's place
    const from = Math.max(start, shown);
    const mark = element('mark', { title: `${kind}, ${percent(score)}` }, part(from, end), element('span', { class: 'kind' }, kind));
    mark.style.setProperty('--hue', kinds.indexOf(kind) * GOLDEN_ANGLE);
    const before = part(shown, from);
    shown = end;
    return [before, mark];
  });
  place.firstElementChild.replaceChildren(...pieces, part(shown));
  const counts = entities.length === 1 ? '1 entity' : `${entities.length} entities`;
  return entities.length ? `${counts}: ${entities.map(({ word, entity_group: kind }) => `${word}, ${kind}`).join('; ')}` : NO_ENTITY;
}
