// A server in the guest, reached at a host of its own.

import http from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'

import { assert, sandbox } from './common.mjs'

// Much of what a guest's server takes, where processors are emulated, is to import one.
const SERVER = `
import socket
server = socket.create_server(("127.0.0.1", 8000))
while True:
    client, _ = server.accept()
    path = client.recv(65536).split()[1]
    client.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n" + path)
    client.close()
`

/** Asks the gateway as it is asked for this host. */
function fetch(host, path) {
  return new Promise((resolve, reject) => {
    const request = http.get(new URL(path, process.env.E2B_API_URL), { headers: { host } })
    request.on('error', reject)
    request.on('response', (response) => {
      let body = ''
      response.setEncoding('utf8')
      response.on('data', (text) => (body += text))
      response.on('end', () => resolve({ status: response.statusCode, body }))
    })
  })
}

await sandbox({}, async (made) => {
  await made.files.write('/tmp/serve.py', SERVER)
  await made.commands.run('python3 /tmp/serve.py', { background: true, timeoutMs: 0 })
  const host = made.getHost(8000)
  assert.equal(host.split('.')[0], `8000-${made.sandboxId}`)
  let answer = await fetch(host, '/hello')
  while (answer.status === 502) {
    assert.match(answer.body, /port is not open/)
    await sleep(200)
    answer = await fetch(host, '/hello')
  }
  assert.deepEqual(answer, { status: 200, body: '/hello' })
})
