// A request as code to copy: for curl, and for the Python client.

const MAX_LINE = 88;
const INDENT = '        ';
const KEY_VARIABLE = 'ALBERT_API_KEY';
const PYTHON_WORDS = { true: 'True', false: 'False', null: 'None' };

/** A command for a POSIX shell that sends `request` to `task`. */
export function curl(service, task, request) {
  const lines = [`curl ${shellQuote(`${service.url}/${task}`)}`, "-H 'Content-Type: application/json'"];
  if (service.wantsKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${shellQuote(flat(request))}`);
  return lines.join(' \\\n  ');
}

/** A Python program that prints the answer to `request`. */
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

/** JSON in one line, with the spaces that a reader would set. */
const flat = (value) => JSON.stringify(value, null, 1).replace(/,\n\s*/g, ', ').replace(/\n\s*/g, '');

/** A value of JSON as Python, which writes strings alike; a long one with each item in its own line. */
function literal(value) {
  const isLong = flat(value).length > MAX_LINE - INDENT.length;
  const json = isLong ? JSON.stringify(value, null, 4).replaceAll('\n', `\n${INDENT}`) : flat(value);
  return json.replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, (token) => PYTHON_WORDS[token] ?? token);
}

function shellQuote(text) {
  return /^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
