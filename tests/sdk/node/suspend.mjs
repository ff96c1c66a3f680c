// Pause and connect: files, processes and the ID stay; and what happens when the time is over.

import { setTimeout as sleep } from 'node:timers/promises'

import { Sandbox, assert, rejects, sandbox, sdk } from './common.mjs'

await sandbox({ lifecycle: { onTimeout: 'pause' } }, async (made) => {
  await made.files.write('/tmp/note', 'before')
  const handle = await made.commands.run('sleep 1000', { background: true })
  await handle.disconnect()

  await made.betaPause()
  assert.equal((await made.getInfo()).state, 'paused')
  const again = await Sandbox.connect(made.sandboxId, { timeoutMs: 200_000 })
  assert.equal(again.sandboxId, made.sandboxId)
  assert.equal((await again.getInfo()).state, 'running')
  assert.equal(await again.files.read('/tmp/note'), 'before')
  assert.ok((await again.commands.list()).some((process) => process.pid === handle.pid))

  await again.setTimeout(1_000)
  while ((await made.getInfo()).state !== 'paused') await sleep(200)
  // The end of a paused one needs no resume.
  assert.equal(await Sandbox.kill(made.sandboxId), true)
  await rejects(Sandbox.connect(made.sandboxId), sdk.SandboxNotFoundError)
})
