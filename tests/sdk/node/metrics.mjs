// What a sandbox uses: processors, memory and disk.

import { setTimeout as sleep } from 'node:timers/promises'

import { assert, sandbox } from './common.mjs'

await sandbox({}, async (made) => {
  const info = await made.getInfo()
  let found = []
  while (!found.length) {
    found = await made.getMetrics()
    if (!found.length) await sleep(500)
  }
  const last = found.at(-1)
  assert.equal(last.cpuCount, info.cpuCount)
  assert.ok(0 < last.memUsed && last.memUsed < last.memTotal, JSON.stringify(last))
  assert.ok(0 < last.diskUsed && last.diskUsed < last.diskTotal, JSON.stringify(last))
})
