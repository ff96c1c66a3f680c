// Forks: copies of a running sandbox, which go their own ways.

import { assert, sandbox } from './common.mjs'

await sandbox({}, async (made) => {
  await made.files.write('/tmp/note', 'one')
  const copies = await made.fork({ count: 2, timeoutMs: 100_000 })
  assert.equal(new Set([made, ...copies].map((one) => one.sandboxId)).size, 3)
  try {
    await copies[0].files.write('/tmp/note', 'two')
    assert.equal(await copies[1].files.read('/tmp/note'), 'one')
    assert.equal(await made.files.read('/tmp/note'), 'one')
  } finally {
    await Promise.all(copies.map((copy) => copy.kill()))
  }
})
