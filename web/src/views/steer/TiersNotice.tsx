// The notice that global steering is on, with a way to clear it.
import { useState } from "react";
import { TIERS } from "../../api/steering";
import { usePage } from "../../state/page";
import { tierWords } from "../../text/steeringWords";
import { Dialog } from "../Dialog";
import { useView } from "../hooks";

export function TiersNotice() {
  const words = useView((state) => (state.steering.kind === "on" ? tierWords(state.steering.tiers) : ""));
  const [isAsking, setAsking] = useState(false);
  if (words === "") return null;
  return (
    <>
      <p className="banner" data-tone="busy">
        <strong>Global steering is on.</strong> {words}. It steers every new request.{" "}
        <button type="button" className="quiet" onClick={() => setAsking(true)}>
          Clear
        </button>
      </p>
      {isAsking && <Confirm words={words} onClose={() => setAsking(false)} />}
    </>
  );
}

function Confirm({ words, onClose }: { words: string; onClose: () => void }) {
  const page = usePage();
  const [fault, setFault] = useState<string | null>(null);
  const clear = async () => {
    try {
      const body = Object.fromEntries(TIERS.map((tier) => [tier, []]));
      await page.server.json("v1/steering", { method: "POST", body });
      await page.monitor.refreshSteering();
      onClose();
    } catch (error) {
      setFault(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <Dialog
      title="Clear global steering?"
      onClose={onClose}
      action={
        <button type="button" onClick={() => void clear()}>
          Clear for all requests
        </button>
      }
    >
      <p>It steers every request to this engine. {words}. Running requests keep it.</p>
      {fault !== null && (
        <p className="failure" role="alert">
          {fault}
        </p>
      )}
    </Dialog>
  );
}
