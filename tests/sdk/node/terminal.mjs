// Terminals: input, output, size, another client, and the end.

import { Sandbox, assert, sandbox, sdk } from './common.mjs'

/** Collects what a terminal shows, and tells when words have come. */
class Screen {
  text = ''
  waiting = []
  decoder = new TextDecoder()

  show = (data) => {
    this.text += this.decoder.decode(data, { stream: true })
    this.waiting = this.waiting.filter(({ words, done }) => !this.text.includes(words) || done())
  }

  until(words) {
    return new Promise((resolve) => {
      this.waiting.push({ words, done: () => void resolve() })
      this.show(new Uint8Array())
    })
  }
}

const type = (made, pid, text) => made.pty.sendInput(pid, new TextEncoder().encode(text))

await sandbox({}, async (made) => {
  const screen = new Screen()
  const handle = await made.pty.create({
    cols: 100,
    rows: 30,
    envs: { MARK: 'from-env' },
    cwd: '/usr/share',
    onData: screen.show,
  })
  // What is typed is shown too, so the words to wait for are not in it.
  await type(made, handle.pid, 'echo "[$MARK] [$PWD]" "[$(stty size)]"\n')
  await screen.until('[from-env] [/usr/share] [30 100]')
  await made.pty.resize(handle.pid, { cols: 132, rows: 50 })
  await type(made, handle.pid, 'echo "[$(stty size)]"\n')
  await screen.until('[50 132]')
  await handle.disconnect()

  const second = new Screen()
  const other = await Sandbox.connect(made.sandboxId)
  const again = await other.pty.connect(handle.pid, { onData: second.show })
  await type(made, handle.pid, 'echo again-$((6*7))\n')
  await second.until('again-42')
  await type(made, handle.pid, 'exit 5\n')
  const ended = await again.wait().catch((error) => error)
  assert.ok(ended instanceof sdk.CommandExitError, String(ended))
  assert.equal(ended.exitCode, 5)
  assert.equal(await made.pty.kill(handle.pid), false)
})
