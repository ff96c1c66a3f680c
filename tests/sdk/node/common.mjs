// What the scenarios share: the SDK under test, a limit on their time, and sandboxes that are gone
// when they end.

import assert from 'node:assert/strict'

const sdk = await import(`${process.env.E2B_SDK}/dist/index.mjs`)

export { assert, sdk }
export const Sandbox = sdk.Sandbox

// A hang ends well before anybody gives up on the whole run.
setTimeout(() => {
  console.error('the scenario takes too long; it waits for:', process.getActiveResourcesInfo())
  process.exit(1)
}, 150_000).unref()

/** Gives `use` a sandbox that is killed in the end. */
export async function sandbox(options, use, template = 'base') {
  const made = await Sandbox.create(template, { timeoutMs: 300_000, ...options })
  try {
    await use(made)
  } finally {
    await made.kill()
  }
}

/** Checks that the promise fails with exactly this kind of error, and with these words in it. */
export async function rejects(promise, kind, words = '') {
  const error = await promise.then(
    () => assert.fail(`no ${kind.name}`),
    (error) => error,
  )
  assert.equal(error.constructor.name, kind.name, String(error))
  assert.ok(error.message.includes(words), `${words} is not in ${error.message}`)
}
