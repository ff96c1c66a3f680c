// Commands in the background: input, other clients by process ID, and the end.

import { Sandbox, assert, sandbox, sdk } from './common.mjs'

await sandbox({}, async (made) => {
  const { commands } = made

  let handle = await commands.run('read a; echo "got $a"; cat; exit 3', {
    background: true,
    stdin: true,
  })
  assert.ok((await commands.list()).some((process) => process.pid === handle.pid))
  await handle.disconnect()

  const other = await Sandbox.connect(made.sandboxId)
  const again = await other.commands.connect(handle.pid)
  await commands.sendStdin(handle.pid, 'one\n')
  await commands.sendStdin(handle.pid, 'two\n')
  await commands.closeStdin(handle.pid)
  const ended = await again.wait().catch((error) => error)
  assert.ok(ended instanceof sdk.CommandExitError, String(ended))
  assert.deepEqual([ended.exitCode, ended.stdout], [3, 'got one\ntwo\n'])

  handle = await commands.run('sleep 1000', { background: true })
  assert.equal(await handle.kill(), true)
  const killed = await handle.wait().catch((error) => error)
  assert.ok(killed instanceof sdk.CommandExitError, String(killed))
  assert.equal(await commands.kill(handle.pid), false)
})
