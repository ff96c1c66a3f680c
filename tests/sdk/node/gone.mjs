// What is not there: a gone sandbox, a wrong key, and another tenant's sandbox.

import { Sandbox, assert, rejects, sandbox, sdk } from './common.mjs'

const other = { apiKey: process.env.OTHER_API_KEY }

await rejects(Sandbox.create({ apiKey: `e2b_${'0'.repeat(40)}` }), sdk.AuthenticationError)

await sandbox({}, async (made) => {
  const id = made.sandboxId
  await rejects(Sandbox.connect(id, other), sdk.SandboxNotFoundError)
  await rejects(Sandbox.getInfo(id, other), sdk.SandboxNotFoundError)
  await rejects(Sandbox.setTimeout(id, 1_000, other), sdk.SandboxNotFoundError)
  await rejects(Sandbox.betaPause(id, other), sdk.SandboxNotFoundError)
  await rejects(Sandbox.getMetrics(id, other), sdk.SandboxNotFoundError)
  assert.equal(await Sandbox.kill(id, other), false)
  assert.equal((await made.commands.run('echo untouched')).stdout, 'untouched\n')

  await made.kill()
  await rejects(made.getInfo(), sdk.SandboxNotFoundError)
  await rejects(made.setTimeout(100_000), sdk.SandboxNotFoundError)
  await rejects(Sandbox.connect(id), sdk.SandboxNotFoundError)
  for (const use of [
    () => made.commands.run('true'),
    () => made.commands.list(),
    () => made.files.read('/etc/hostname'),
    () => made.files.write('/tmp/x', 'x'),
  ]) {
    const error = await use().catch((error) => error)
    assert.ok(
      error instanceof sdk.SandboxNotFoundError || error instanceof sdk.TimeoutError,
      String(error),
    )
    assert.match(error.message, /not found|not running anymore/)
  }
})
