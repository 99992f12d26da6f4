// How coherent sentences are: a figure and a bar.

import { percent } from './elements.js';

// Nearer to chance than this is neither well nor badly ordered.
const CHANCE = [0.4, 0.6];

/** What a probability of being in order says, as a word for the style sheet. */
export function verdict(probability) {
  if (probability === null) return 'none';
  const [low, high] = CHANCE;
  if (probability < low) return 'bad';
  return probability > high ? 'good' : 'even';
}

export class Gauge {
  #parts;

  constructor(place) {
    const find = (selector) => place.querySelector(selector);
    this.#parts = { value: find('.gauge-value'), track: find('.gauge-track'), fill: find('.gauge-fill') };
  }

  /** Show a coherence, or null for none; returns it in words. */
  show(coherence) {
    const { value, track, fill } = this.#parts;
    const share = coherence ?? 0;
    value.textContent = coherence === null ? '–' : percent(coherence);
    fill.style.width = `${share * 100}%`;
    fill.dataset.verdict = verdict(coherence);
    track.setAttribute('aria-valuenow', (share * 100).toFixed(1));
    return `Coherence ${value.textContent}`;
  }
}
