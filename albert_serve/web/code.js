// Requests as code for curl and for the Python client.

const MAX_LINE = 88;
const INDENT = '        ';
const KEY_VARIABLE = 'ALBERT_API_KEY';
const PYTHON_WORDS = { true: 'True', false: 'False', null: 'None' };

/** Return a command for a POSIX shell that sends `request` to `task`. */
export function curl(service, task, request) {
  const lines = [`curl ${shellQuote(`${service.url}/${task}`)}`, "-H 'Content-Type: application/json'"];
  if (service.wantsKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${shellQuote(flat(request))}`);
  return lines.join(' \\\n  ');
}

/** Return a Python program that prints the answer to `request`. */
export function python(service, task, { inputs, parameters = {} }) {
  const isOrder = task === 'sentence-order';
  const call = `    answer = albert.${isOrder ? 'coherence' : task.replaceAll('-', '_')}(`;
  const options = Object.entries(parameters).map(([name, value]) => [`${name}=`, value]);
  const parts = [['', isOrder ? inputs.sentences : inputs], ...options].map(([name, value]) => name + literal(value));
  const line = `${call}${parts.join(', ')})`;
  const model = service.model === null ? '' : `, model=${JSON.stringify(service.model)}`;
  const key = service.wantsKey ? `, api_key=os.environ["${KEY_VARIABLE}"]` : '';
  return [
    ...(service.wantsKey ? ['import os', ''] : []),
    'from albert_serve.client import AlbertClient',
    '',
    `with AlbertClient(${JSON.stringify(service.root)}${model}${key}) as albert:`,
    line.length <= MAX_LINE ? line : `${call}\n${parts.map((part) => `${INDENT}${part},\n`).join('')}    )`,
    'print(answer)',
  ].join('\n');
}

/** Format JSON in one line with the usual spaces. */
const flat = (value) => JSON.stringify(value, null, 1).replace(/,\n\s*/g, ', ').replace(/\n\s*/g, '');

/** Format a JSON value as Python, whose strings are the same. Long values have one item per line. */
function literal(value) {
  const isLong = flat(value).length > MAX_LINE - INDENT.length;
  const json = isLong ? JSON.stringify(value, null, 4).replaceAll('\n', `\n${INDENT}`) : flat(value);
  return json.replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, (token) => PYTHON_WORDS[token] ?? token);
}

function shellQuote(text) {
  return /^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
