// Watches of directories: what happens in them is told as it happens.

import { assert, rejects, sandbox, sdk } from './common.mjs'

/** Collects events, and tells when one has come. */
class Events {
  seen = []
  waiting = []

  add = (event) => {
    this.seen.push(`${event.type} ${event.name}`)
    this.waiting.forEach((check) => check())
  }

  until(words) {
    return new Promise((resolve) => {
      const check = () => this.seen.includes(words) && resolve()
      this.waiting.push(check)
      check()
    })
  }
}

await sandbox({}, async (made) => {
  const { files } = made
  const [shallow, deep] = [new Events(), new Events()]
  await files.makeDir('w/deep')
  const first = await files.watchDir('w', shallow.add)
  const second = await files.watchDir('w', deep.add, { recursive: true })

  await files.write('w/new', 'x')
  for (const events of [shallow, deep]) {
    await events.until('create new')
    await events.until('write new')
  }
  await files.rename('w/new', 'w/renamed')
  await shallow.until('rename new')
  await files.remove('w/renamed')
  await shallow.until('remove renamed')
  await files.write('w/deep/file', 'x')
  await deep.until('create deep/file')
  await files.write('w/last', 'x')
  await shallow.until('create last')
  assert.deepEqual(shallow.seen.filter((event) => event.includes('/')), [])

  await first.stop()
  await second.stop()
  await rejects(files.watchDir('none', () => {}), sdk.FileNotFoundError)
})
