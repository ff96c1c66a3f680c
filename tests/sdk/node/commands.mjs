// Commands in the foreground: their output, exit codes, environment, directory, user and limit.

import { createHash } from 'node:crypto'

import { assert, rejects, sandbox, sdk } from './common.mjs'

await sandbox({ envs: { FROM_SANDBOX: 'one', BOTH: 'sandbox' } }, async (made) => {
  const run = (command, options) => made.commands.run(command, options)

  let result = await run('echo out; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])

  const failed = await run('echo why >&2; exit 7').catch((error) => error)
  assert.ok(failed instanceof sdk.CommandExitError, String(failed))
  assert.deepEqual([failed.exitCode, failed.stderr], [7, 'why\n'])

  let told = ''
  await run('echo 1; sleep 0.2; echo 2', { onStdout: (text) => void (told += text) })
  assert.equal(told, '1\n2\n')

  const words = 'echo "$FROM_SANDBOX $FROM_COMMAND $BOTH"'
  result = await run(words, { envs: { FROM_COMMAND: 'two', BOTH: 'command' } })
  assert.equal(result.stdout, 'one two command\n')
  assert.equal((await run('pwd', { cwd: '/usr/share' })).stdout, '/usr/share\n')
  assert.equal((await run('id -un; pwd')).stdout, 'user\n/home/user\n')
  assert.equal((await run('id -u', { user: 'root' })).stdout, '0\n')

  result = await run('seq 1000000000 | head -c 2097152')
  const digest = createHash('sha256').update(result.stdout).digest('hex')
  const wanted = (await run('seq 1000000000 | head -c 2097152 | sha256sum')).stdout
  assert.equal(`${digest}  -\n`, wanted)

  await rejects(run('sleep 1000', { timeoutMs: 1_000 }), sdk.TimeoutError)
})
