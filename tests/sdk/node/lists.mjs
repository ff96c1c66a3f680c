// Lists of sandboxes: filters by metadata and state, and pages.

import { randomUUID } from 'node:crypto'

import { Sandbox, assert, sandbox } from './common.mjs'

const run = randomUUID()

/** The IDs on each page. */
async function ids(query, options = {}) {
  const pages = Sandbox.list({ query, ...options })
  const found = []
  while (pages.hasNext) found.push((await pages.nextItems()).map((item) => item.sandboxId))
  return found
}

await sandbox({ metadata: { run, role: 'first' } }, async (first) => {
  await sandbox({ metadata: { run, role: 'second' } }, async (second) => {
    const both = [first.sandboxId, second.sandboxId].sort()
    assert.deepEqual((await ids({ metadata: { run } })).flat().sort(), both)
    const pages = (await ids({ metadata: { run } }, { limit: 1 })).filter((page) => page.length)
    assert.deepEqual(pages.map((page) => page.length), [1, 1])
    assert.deepEqual(pages.flat().sort(), both)
    assert.deepEqual(await ids({ metadata: { run, role: 'first' } }), [[first.sandboxId]])

    await second.betaPause()
    assert.deepEqual(await ids({ metadata: { run }, state: ['paused'] }), [[second.sandboxId]])
    assert.deepEqual(await ids({ metadata: { run }, state: ['running'] }), [[first.sandboxId]])
    const other = { apiKey: process.env.OTHER_API_KEY }
    assert.deepEqual(await ids({ metadata: { run } }, other), [[]])
  })
})
assert.deepEqual(await ids({ metadata: { run } }), [[]])
