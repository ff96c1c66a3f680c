// A sandbox from create to kill: what it says of itself, its timeout, and a second kill.

import { Sandbox, assert, sandbox } from './common.mjs'

const asked = Date.now()
await sandbox(
  { metadata: { owner: 'lifecycle' }, envs: { GREETING: 'hello' }, timeoutMs: 100_000 },
  async (made) => {
    const info = await made.getInfo()
    assert.equal(info.sandboxId, made.sandboxId)
    assert.deepEqual(info.metadata, { owner: 'lifecycle' })
    assert.equal(info.state, 'running')
    assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128)
    // Its time begins when it is there, which takes as long as it takes.
    const waited = info.endAt - info.startedAt - 100_000
    assert.ok(-1_000 <= waited && waited <= Date.now() - asked, String(waited))
    assert.ok(Math.abs(Date.now() - info.startedAt) < 60_000, 'the clocks differ')

    const now = Date.now()
    await made.setTimeout(1_000_000)
    const later = (await made.getInfo()).endAt - now
    assert.ok(900_000 < later && later < 1_100_000, String(later))

    assert.ok(await made.isRunning())
    assert.equal((await made.commands.run('echo $GREETING')).stdout, 'hello\n')

    assert.equal(await Sandbox.kill(made.sandboxId), true)
    assert.equal(await made.isRunning(), false)
    assert.equal(await Sandbox.kill(made.sandboxId), false)
  },
)
