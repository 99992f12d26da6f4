// The form and the answers of feature extraction: which texts are alike.

import { showBars } from './bars.js';
import { element } from './elements.js';
import { linesOf, requestOf } from './service.js';

export function featureExtraction(section, _info, _running, examples) {
  const fields = section.querySelector('form').elements;
  return {
    name: 'feature-extraction',
    heading: 'Cosine similarity',
    examples,
    fill: ({ inputs }) => { fields.texts.value = inputs.join('\n'); },
    read: () => requestOf(linesOf(fields.texts.value), parametersOf(fields)),
    call: ({ inputs, parameters }) => ({ method: 'feature_extraction', given: [inputs], options: parameters }),
    show: (embeddings, request, place) => show(embeddings, request.inputs, place),
  };
}

function parametersOf({ cls, truncate }) {
  const parameters = { normalize: true };
  if (cls.checked) parameters.pooling = 'cls';
  if (truncate.checked) parameters.truncation = true;
  return parameters;
}

/** Show a text and below it the others, the most alike first; any of them can take its place. */
function show(embeddings, texts, place) {
  if (!place.hasChildNodes()) place.append(element('ol', { class: 'bars long alike' }));
  const [list] = place.children;
  const compare = (chosen) => {
    const order = ordered(embeddings, chosen);
    const rows = order.map(({ index, cosine }) => ({
      label: texts[index], score: cosine, width: cosine, figure: rounded(cosine),
    }));
    const onChoose = (row) => {
      compare(order[row].index);
      list.querySelector('button').focus();
    };
    showBars(list, rows, { onChoose, chosen: 0 });
    return order;
  };
  const [, nearest] = compare(0);
  return nearest ? `Most similar to the first: ${texts[nearest.index]}, ${rounded(nearest.cosine)}` : 'Nothing to compare it with';
}

/** The texts by {index, cosine} with the chosen one, which is the first. */
function ordered(embeddings, chosen) {
  const all = embeddings.map((embedding, index) => ({ index, cosine: product(embedding, embeddings[chosen]) }));
  const others = all.filter(({ index }) => index !== chosen).sort((one, other) => other.cosine - one.cosine);
  return [all[chosen], ...others];
}

/** Of two vectors of length 1: the cosine of their angle. */
function product(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

/** Two decimals, and no zero with a sign. */
function rounded(cosine) {
  return (Math.round(cosine * 100) / 100 || 0).toFixed(2);
}
