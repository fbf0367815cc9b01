// A TCP relay to a server, whose connections a journey can cut before the end of a run.
import { connect, createServer, type AddressInfo, type Socket } from "node:net";

const END = "event: done";

export interface Relay extends AsyncDisposable {
  url: string;
  /** While it is set, a connection on which a run's last event comes brings no more. */
  holdsEnds: boolean;
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
    passOn(far, client, () => relay.holdsEnds);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const cut = () => {
    for (const socket of open) socket.resetAndDestroy();
  };
  const relay: Relay = {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    holdsEnds: false,
    cut,
    [Symbol.asyncDispose]: async () => {
      cut();
      await new Promise((resolve) => server.close(resolve));
    },
  };
  return relay;
}

function passOn(far: Socket, client: Socket, holdsEnds: () => boolean): void {
  let tail = ""; // of what came before: the event's name may be spread over two pieces
  far.on("data", (piece: Buffer) => {
    const seen = tail + piece.toString("latin1");
    const end = holdsEnds() ? seen.indexOf(END) : -1;
    if (end < 0) {
      client.write(piece);
      tail = seen.slice(1 - END.length);
    } else {
      client.write(piece.subarray(0, Math.max(0, end - tail.length)));
      far.pause();
    }
  });
  far.on("end", () => client.end());
}
