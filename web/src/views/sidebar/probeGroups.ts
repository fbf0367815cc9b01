// Sorts probes by layer, groups them, and searches them.
import type { ProbeInfo } from "../../api/types";
import { placeOf } from "../../text/point";

export interface Group {
  layer: number;
  probes: ProbeInfo[];
}

export function ordered(probes: readonly ProbeInfo[]): ProbeInfo[] {
  return [...probes].sort(
    (a, b) => placeOf(a.point).layer - placeOf(b.point).layer || a.name.localeCompare(b.name),
  );
}

export function grouped(probes: readonly ProbeInfo[]): Group[] {
  const groups: Group[] = [];
  for (const probe of ordered(probes)) {
    const { layer } = placeOf(probe.point);
    const last = groups.at(-1);
    if (last?.layer === layer) last.probes.push(probe);
    else groups.push({ layer, probes: [probe] });
  }
  return groups;
}

/** Every word of the search must occur in the probe's name, description or point. */
export function matching(probes: readonly ProbeInfo[], search: string): ProbeInfo[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return probes.filter((probe) => {
    const text = `${probe.name} ${probe.description ?? ""} ${probe.point}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}
