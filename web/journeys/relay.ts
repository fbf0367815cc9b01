// A TCP relay to a server, whose connections a journey can cut.
import { connect, createServer, type AddressInfo, type Socket } from "node:net";

export interface Relay extends AsyncDisposable {
  url: string;
  /** Break every open connection; new ones still work. */
  cut(): void;
}

export async function relayTo(target: string): Promise<Relay> {
  const { hostname, port } = new URL(target);
  const open = new Set<Socket>();
  const server = createServer((client) => {
    const far = connect(Number(port), hostname);
    for (const socket of [client, far]) {
      open.add(socket);
      socket.on("close", () => open.delete(socket));
      socket.on("error", () => socket.destroy());
    }
    client.pipe(far);
    far.pipe(client);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const cut = () => {
    for (const socket of open) socket.resetAndDestroy();
  };
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    cut,
    [Symbol.asyncDispose]: async () => {
      cut();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}
