// Snapshots: sandboxes made from them, their list, and their removal.

import { Sandbox, assert, rejects, sandbox, sdk } from './common.mjs'

await sandbox({}, async (made) => {
  await made.files.write('/tmp/note', 'one')
  const { snapshotId } = await made.createSnapshot()
  await made.files.write('/tmp/note', 'two')

  await sandbox({}, async (copy) => {
    assert.notEqual(copy.sandboxId, made.sandboxId)
    assert.equal(await copy.files.read('/tmp/note'), 'one')
    assert.equal(await made.files.read('/tmp/note'), 'two')
    const listed = await made.listSnapshots().nextItems()
    assert.deepEqual(listed.map((item) => item.snapshotId), [snapshotId])
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
    await rejects(Sandbox.create(snapshotId), sdk.SandboxError, 'was not found')
    assert.equal(await copy.files.read('/tmp/note'), 'one')
  }, snapshotId)
})
