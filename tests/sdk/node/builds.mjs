// Templates built step by step, their tags, and builds that fail.

import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

import { assert, rejects, Sandbox, sandbox, sdk } from './common.mjs'

const { BuildError, Template } = sdk
const name = `js-built-${process.pid}`
const context = await mkdtemp(join(tmpdir(), 'context-'))

try {
  await writeFile(join(context, 'note'), 'copied\n')
  const template = Template({ fileContextPath: context })
    .fromTemplate('base')
    .setEnvs({ GREETING: 'hello' })
    .copy('note', '/srv/note', { user: 'root', mode: 0o644 })
    .runCmd('echo $GREETING > said')
    .setReadyCmd('test -s said')
  const lines = []
  const onBuildLogs = (line) => lines.push(line.message)
  const built = await Template.build(template, `${name}:v1`, { onBuildLogs })
  assert.ok(lines.some((line) => line.includes('RUN echo')), String(lines))

  const given = await Template.assignTags(`${name}:v1`, ['stable'])
  assert.deepEqual(given, { buildId: built.buildId, tags: ['stable', 'v1'] })
  await Template.removeTags(name, 'v1')
  assert.deepEqual((await Template.getTags(name)).map((tag) => tag.tag), ['stable'])

  await sandbox({}, async (made) => {
    const shown = await made.commands.run('cat said /srv/note; stat -c "%U %a" /srv/note')
    assert.equal(shown.stdout, 'hello\ncopied\nroot 644\n')
  }, `${name}:stable`)

  const failing = Template().fromTemplate(name).runCmd('echo no luck; exit 3')
  await rejects(Template.build(failing, `${name}-failing`), BuildError, 'no luck')
} finally {
  await rm(context, { recursive: true })
  await Sandbox.deleteSnapshot(name)
}
assert.equal(await Template.exists(name), false)
