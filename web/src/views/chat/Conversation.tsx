// The turns of a conversation; scrolls along with the newest token until the user scrolls away.
import { useEffect, useMemo, useRef, useState } from "react";
import { usePage } from "../../state/page";
import { pathTo } from "../../state/store";
import { RUNNING } from "../../state/types";
import { useView } from "../hooks";
import { Composer } from "./Composer";
import { FirstScreen } from "./FirstScreen";
import { Legend } from "./Legend";
import { Turn } from "./Turn";

const NEAR_PX = 48;

export function Conversation() {
  const page = usePage();
  const runs = useView((state) => state.runs);
  const head = useView((state) => state.head);
  const isFrozen = useView((state) => state.isFrozen);
  const hasMarks = useView((state) => state.hasMarks);
  const hasMono = useView((state) => state.hasMono);
  const path = useMemo(() => pathTo(runs, head), [runs, head]);
  const isRunning = RUNNING.has(path.at(-1)?.status ?? "done");
  const scroller = useRef<HTMLDivElement>(null);
  const [isFollowing, setFollowing] = useState(true);
  useEffect(() => {
    const box = scroller.current;
    if (!box || head === null || !isFollowing) return;
    const follow = () => box.scrollTo({ top: box.scrollHeight });
    follow();
    return page.transcripts.subscribe(head, follow);
  }, [page, head, isFollowing]);
  const watch = () => {
    const box = scroller.current;
    if (box) setFollowing(box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX);
  };
  return (
    <section className="conversation" aria-label="Conversation">
      {path.length > 0 && <Legend />}
      <div
        ref={scroller}
        className="turns"
        onScroll={watch}
        data-marks={hasMarks || undefined}
        data-mono={hasMono || undefined}
      >
        {path.length === 0 ? <FirstScreen /> : path.map((run) => <Turn key={run.id} run={run} />)}
      </div>
      {!isFollowing && isRunning && (
        <button type="button" className="newest" onClick={() => setFollowing(true)}>
          Newest token
        </button>
      )}
      {!isFrozen && <Composer />}
    </section>
  );
}
