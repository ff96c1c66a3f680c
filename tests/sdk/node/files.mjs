// Files and directories: written, read, listed, renamed, removed; small, big, and several at once.

import { createHash, randomBytes } from 'node:crypto'

import { assert, rejects, sandbox, sdk } from './common.mjs'

const array = (bytes) => bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength)

await sandbox({}, async (made) => {
  const { files } = made

  const written = await files.write('notes/today.txt', 'grüße\n')
  assert.equal(written.path, '/home/user/notes/today.txt')
  assert.equal(await files.read('notes/today.txt'), 'grüße\n')
  const info = await files.getInfo('notes/today.txt')
  assert.deepEqual([info.type, info.size, info.owner], ['file', 8, 'user'])
  await rejects(files.read('none'), sdk.FileNotFoundError)
  await rejects(files.list('none'), sdk.FileNotFoundError)
  assert.equal(await files.exists('none'), false)

  assert.equal(await files.makeDir('tree/a'), true)
  assert.equal(await files.makeDir('tree/a'), false)
  await files.write('tree/a/file', 'x')
  const deep = (await files.list('tree', { depth: 2 })).map((entry) => entry.path).sort()
  assert.deepEqual(deep, ['/home/user/tree/a', '/home/user/tree/a/file'])
  assert.equal((await files.rename('tree/a/file', 'tree/moved')).path, '/home/user/tree/moved')
  await files.remove('tree/moved')
  assert.deepEqual((await files.list('tree')).map((entry) => entry.name), ['a'])

  const data = randomBytes(8 << 20)
  const wanted = createHash('sha256').update(data).digest('hex')
  await files.write('/tmp/big', array(data))
  const sum = await made.commands.run('sha256sum < /tmp/big')
  assert.equal(sum.stdout, `${wanted}  -\n`)
  assert.ok(data.equals(await files.read('/tmp/big', { format: 'bytes' })))
  const hash = createHash('sha256')
  for await (const chunk of await files.read('/tmp/big', { format: 'stream' })) hash.update(chunk)
  assert.equal(hash.digest('hex'), wanted)

  const several = [
    { path: '/tmp/many/empty', data: '' },
    { path: '/tmp/many/ä b', data: array(data.subarray(0, 1000)) },
    { path: '/tmp/many/deep/er', data: array(data.subarray(0, 100_000)) },
  ]
  const entries = await files.write(several)
  assert.deepEqual(entries.map((entry) => entry.path), several.map((entry) => entry.path))
  const back = await files.read('/tmp/many/deep/er', { format: 'bytes' })
  assert.ok(data.subarray(0, 100_000).equals(back))
})
