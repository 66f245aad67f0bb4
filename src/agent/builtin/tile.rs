//! Element-wise kernels that read in one order and write in another, by tiles in shared memory.
//!
//! Threads side by side compute what is read along the tile's one side, in the order in which it lies in memory;
//! then, side by side along the other, what is left, and store it: both ways whole lines of memory are moved.
//! Knows addresses. Must not know which layouts a task has, nor when a kernel is cut so (`schedule`).

use std::collections::HashMap;

use super::emit::{Buffer, Text, Writer};
use super::index::{Ix, VarId, VarKind, Vars, numel};
use super::ir::{Def, Ir, Vid};
use super::kernels::{Kernel, Knob, Spec, decompose, launch, linear, merge_groups, names_e};
use super::ops::Ty;
use crate::plan::Device;

/// Most values that are kept in tiles at a time.
const TILES: usize = 2;

/// The two sides of a tile, outermost variable first; the last is the one along which memory is contiguous.
struct Sides {
    /// As it is read.
    x: Vec<VarId>,
    /// As it is written.
    y: Vec<VarId>,
    /// What tells tiles apart beside.
    rest: Vec<VarId>,
}

/// How a value's elements are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reads {
    /// Nothing that differs along both sides.
    Little,
    /// All in the order of the tile's first side.
    Across,
    /// All as it is written, or in no order that this knows.
    Along,
    Both,
}

struct Planner<'a> {
    ir: &'a Ir,
    buffers: &'a HashMap<Vid, Buffer>,
    vars: Vars,
    sides: Sides,
}

/// Writes the kernel, if something is read in another order than it is written, for one output.
///
/// # Errors
/// A sentence, where a value can't be computed in such a kernel.
pub fn build(ir: &Ir, buffers: &HashMap<Vid, Buffer>, spec: &Spec) -> Result<Option<Kernel>, String> {
    let [(root, output)] = &spec.outputs[..] else { return Ok(None) };
    let mut vars = Vars::default();
    let mut at = vec![Ix::default(); spec.full.len()];
    let mut all = vec![];
    for (d, &size) in spec.full.iter().enumerate() {
        if size > 1 {
            let var = vars.add(format!("d{d}"), size, 1, VarKind::Loop);
            at[d] = Ix::var(var);
            all.push(var);
        }
    }
    let at = vars.reshape(&at, &spec.full, ir.shape(*root));
    let (loads, accesses, probed) = probe(ir, buffers, &vars, &[(*root, at.clone())])?;
    vars = probed;
    let Some(sides) = sides(&vars, &all, &loads, ir) else { return Ok(None) };
    let mut planner = Planner { ir, buffers, vars, sides };
    let mut staged = vec![];
    planner.stage(*root, &at, &mut staged)?;
    if staged.is_empty() {
        return Ok(None);
    }
    if staged.len() > TILES {
        staged = vec![(*root, at.clone())];
    }
    let Planner { vars, sides, .. } = planner;
    let store = linear(ir.shape(*root), &at);
    let mut accesses = accesses;
    accesses.push(store.clone());
    write(ir, buffers, spec, output, (*root, &at, &store), vars, &sides, &staged, &accesses).map(Some)
}

type Load = (Vid, Ix, bool);

/// What computing values would read, and the variables that came up.
fn probe(
    ir: &Ir,
    buffers: &HashMap<Vid, Buffer>,
    vars: &Vars,
    values: &[(Vid, Vec<Ix>)],
) -> Result<(Vec<Load>, Vec<Ix>, Vars), String> {
    let mut w = Writer::new(ir, buffers, Device::Cuda);
    w.vars = vars.clone();
    for (vid, at) in values {
        w.value(*vid, at)?;
    }
    Ok((w.loads, w.accesses, w.vars))
}

/// The sides of a tile: the largest thing that is read along another dimension than the innermost decides.
fn sides(vars: &Vars, all: &[VarId], loads: &[Load], ir: &Ir) -> Option<Sides> {
    let (&inner, _) = all.split_last()?;
    let across = |ix: &Ix| {
        let own = ix.coefficient(inner);
        if own == 0 || own == 1 {
            return None;
        }
        all.iter().position(|&var| var != inner && ix.coefficient(var) == 1)
    };
    let (_, last, _) = loads
        .iter()
        .filter_map(|(vid, ix, _)| across(ix).map(|place| (numel(ir.shape(*vid)), place, ix)))
        .max_by_key(|(size, place, _)| (*size, *place))?;
    let read: Vec<&Ix> = loads.iter().map(|(_, ix, _)| ix).filter(|ix| across(ix) == Some(last)).collect();
    let mut first = last;
    while first > 0
        && read
            .iter()
            .all(|ix| ix.coefficient(all[first - 1]) == ix.coefficient(all[first]) * vars.list[all[first]].size)
    {
        first -= 1;
    }
    Some(Sides { x: all[first..=last].to_vec(), y: all[last + 1..].to_vec(), rest: all[..first].to_vec() })
}

impl Planner<'_> {
    fn reads(&mut self, vid: Vid, at: &[Ix]) -> Result<Reads, String> {
        let (loads, _, vars) = probe(self.ir, self.buffers, &self.vars, &[(vid, at.to_vec())])?;
        self.vars = vars;
        let (last, inner) = (self.sides.x[self.sides.x.len() - 1], self.sides.y[self.sides.y.len() - 1]);
        let (mut across, mut along) = (false, false);
        for (_, ix, _) in &loads {
            if self.vars.depends(ix, &self.sides.x) && self.vars.depends(ix, &self.sides.y) {
                if ix.coefficient(last) == 1 && ix.coefficient(inner) != 1 {
                    across = true;
                } else {
                    along = true;
                }
            }
        }
        Ok(match (across, along) {
            (false, false) => Reads::Little,
            (true, false) => Reads::Across,
            (false, true) => Reads::Along,
            (true, true) => Reads::Both,
        })
    }

    /// The largest values below `vid` that are read across alone.
    fn stage(&mut self, vid: Vid, at: &[Ix], staged: &mut Vec<(Vid, Vec<Ix>)>) -> Result<(), String> {
        if staged.iter().any(|(known, place)| *known == vid && place == at) {
            return Ok(());
        }
        match (self.reads(vid, at)?, self.ir.def(vid).clone()) {
            (Reads::Little | Reads::Along, _) => {}
            (Reads::Both, Def::Point(_, args)) if !self.buffers.contains_key(&vid) => {
                for arg in args {
                    self.stage(arg, at, staged)?;
                }
            }
            (Reads::Both | Reads::Across, Def::View(source, _)) if !self.buffers.contains_key(&vid) => {
                let inner = self.ir.through(vid, at, &mut self.vars);
                self.stage(source, &inner, staged)?;
            }
            _ => staged.push((vid, at.to_vec())),
        }
        Ok(())
    }
}

/// Names and sizes of the groups of a side; the innermost may have a name of its own.
fn groups(vars: &Vars, merged: &[Vec<VarId>], lane: Option<&str>) -> Vec<(String, i64)> {
    let name = |group: &[VarId]| vars.list[group[group.len() - 1]].name.clone();
    let size = |group: &[VarId]| group.iter().map(|&var| vars.list[var].size).product();
    let mut groups: Vec<(String, i64)> = merged.iter().map(|group| (name(group), size(group))).collect();
    if let (Some(lane), Some(last)) = (lane, groups.last_mut()) {
        lane.clone_into(&mut last.0);
    }
    groups
}

/// Longest vector in which a side's lane can be walked.
fn widest(loads: &[(Ix, bool)], lane: &[VarId], merged: &[VarId], side: i64, size: i64) -> i64 {
    let last = lane[lane.len() - 1];
    let mut vector = 4;
    let inside = loads.iter().any(|(ix, deep)| *deep && ix.coefficient(last) == 1);
    while vector > 1
        && (inside
            || side % vector != 0
            || size % vector != 0
            || !loads.iter().any(|(ix, _)| {
                ix.coefficient(last) == 1
                    && ix.constant % vector == 0
                    && ix.terms.iter().all(|(&v, &f)| v == last || merged.contains(&v) || f % vector == 0)
            }))
    {
        vector /= 2;
    }
    vector
}

#[allow(clippy::too_many_arguments, clippy::too_many_lines)]
fn write(
    ir: &Ir,
    buffers: &HashMap<Vid, Buffer>,
    spec: &Spec,
    output: &str,
    (root, at, store): (Vid, &[Ix], &Ix),
    vars: Vars,
    sides: &Sides,
    staged: &[(Vid, Vec<Ix>)],
    accesses: &[Ix],
) -> Result<Kernel, String> {
    let upper = spec.name.to_uppercase();
    let size = |list: &[VarId]| list.iter().map(|&var| vars.list[var].size).product::<i64>();
    let (x, y, rest) = (size(&sides.x), size(&sides.y), size(&sides.rest));
    let sizes = |var: VarId| vars.list[var].size;
    let merged = [&sides.x, &sides.y, &sides.rest].map(|list| merge_groups(list, &sizes, accesses));
    let hidden: Vec<VarId> = merged.iter().flatten().flat_map(|group| group[..group.len() - 1].to_vec()).collect();
    let lane_size = |side: usize| merged[side].last().map_or(1, |group| size(group));

    // Tiles as long as memory lines along each side; where a side is short, longer along the other.
    let edge = |side: i64, other: i64, usual: i64| {
        let edge = if other < 32 { (2048 / other / 32 * 32).max(64) } else { usual };
        side.min(edge)
    };
    let edges = [edge(x, y, 32), edge(y, x, 64)];

    // One phase: what it computes, along which side.
    let phase = |side: usize, w: &mut Writer| {
        let lane = merged[side].last().map_or(0, |group| group[group.len() - 1]);
        let mut list = vars.clone();
        list.relevel(&|var| {
            if var == lane {
                Some(2)
            } else if sides.rest.contains(&var) {
                Some(0)
            } else if sides.x.contains(&var) || sides.y.contains(&var) {
                Some(1)
            } else {
                None
            }
        });
        list.list[lane].name = "e".into();
        w.vars = list;
        w.lane = Some(lane);
        w.merged.extend(&hidden);
    };
    let loop_text = |side: usize, vector: i64, w: &mut Writer| -> Vec<String> {
        let (level0, body1, body2) = (w.take(0), w.take(1), w.take(2));
        let after = std::mem::take(&mut w.after);
        let mut text = vec!["{".to_owned(), format!("constexpr int VEC = {vector};")];
        text.extend(level0);
        text.push("constexpr int ITEMS = (EDGE_X * EDGE_Y + THREADS * VEC - 1) / (THREADS * VEC);".into());
        text.push("#pragma unroll".into());
        text.push("for (int it = 0; it < ITEMS; ++it) {".into());
        text.push("const int place = (it * THREADS + (int)threadIdx.x) * VEC;".into());
        let (fast, slow) = if side == 0 { ("x", "y") } else { ("y", "x") };
        let edge = fast.to_uppercase();
        text.push(format!("const int t{fast} = place % EDGE_{edge}, t{slow} = place / EDGE_{edge};"));
        text.push("const index_t at_x = from_x + tx, at_y = from_y + ty;".into());
        text.push(format!("if (place < EDGE_X * EDGE_Y && (WHOLE || (at_x < {x} && at_y < {y}))) {{"));
        for (which, linear) in [(0, "at_x"), (1, "at_y")] {
            let names = groups(&w.vars, &merged[which], (which == side).then_some("e0"));
            decompose(linear, &names, &mut text);
        }
        text.extend(body1);
        text.push("#pragma unroll".into());
        text.push("for (int j = 0; j < VEC; ++j) {".into());
        if names_e(&body2) {
            text.push("const index_t e = e0 + j;".into());
        }
        text.extend(body2);
        text.push("}".into());
        text.extend(after);
        text.extend(["}".to_owned(), "}".into(), "}".into()]);
        text
    };

    // First what is read across, into tiles.
    let mut first = Writer::new(ir, buffers, Device::Cuda);
    let (loads, _, _) = probe(ir, buffers, &vars, staged)?;
    let loads: Vec<(Ix, bool)> = loads.into_iter().map(|(_, ix, deep)| (ix, deep)).collect();
    let lane = merged[0].last().map_or(&[][..], |group| &group[..]);
    let vector = widest(&loads, lane, &hidden, lane_size(0), x.min(edges[0]));
    phase(0, &mut first);
    first.vector = vector;
    let mut tiles = vec![];
    for (number, (vid, place)) in staged.iter().enumerate() {
        let value = first.value(*vid, place)?;
        tiles.push((format!("tile{number}_"), value.ty));
        first.scopes[2].push(format!("tile{number}_[(tx + j) * PITCH + ty] = {};", value.text));
    }
    let read = loop_text(0, vector, &mut first);

    // Then the rest, as it is written.
    let mut second = Writer::new(ir, buffers, Device::Cuda);
    let lane = merged[1].last().map_or(&[][..], |group| &group[..]);
    let vector = widest(&[(store.clone(), false)], lane, &hidden, lane_size(1), y.min(edges[1]));
    phase(1, &mut second);
    second.vector = vector;
    for ((vid, place), (name, kind)) in staged.iter().zip(&tiles) {
        let text = format!("{name}[tx * PITCH + ty + j]");
        second.hold(*vid, place, Text { text, level: 2, ty: *kind });
    }
    let value = second.value(root, at)?;
    second.store(output, ir.vals[root].dtype, store, &value);
    let written = loop_text(1, vector, &mut second);

    let mut text = vec![];
    for (edge, side, count) in [("X", x, edges[0]), ("Y", y, edges[1])] {
        // A side shorter than a tile is one tile.
        text.push(if count < side {
            format!("constexpr int EDGE_{edge} = {upper}_{edge} < {side} ? {upper}_{edge} : {side};")
        } else {
            format!("constexpr int EDGE_{edge} = {side};")
        });
    }
    text.push(format!("constexpr int THREADS = {upper}_THREADS;"));
    text.push(format!("constexpr int TILES_X = ({x} + EDGE_X - 1) / EDGE_X, TILES_Y = ({y} + EDGE_Y - 1) / EDGE_Y;"));
    text.push(format!("constexpr bool WHOLE = {x} % EDGE_X == 0 && {y} % EDGE_Y == 0;"));
    text.push("// An odd pitch: neither way two threads of a warp want one bank at a time.".into());
    text.push("constexpr int PITCH = EDGE_Y | 1;".into());
    for (name, kind) in &tiles {
        text.push(format!("__shared__ {} {name}[EDGE_X * PITCH];", kind.name()));
    }
    text.push("const int block = blockIdx.x;".into());
    text.push("const index_t from_x = (index_t)(block % TILES_X) * EDGE_X;".into());
    text.push("const index_t from_y = (index_t)(block / TILES_X % TILES_Y) * EDGE_Y;".into());
    if rest > 1 {
        text.push("const index_t rest = block / TILES_X / TILES_Y;".into());
        decompose("rest", &groups(&vars, &merged[2], None), &mut text);
    }
    text.extend(read);
    text.push("__syncthreads();".into());
    text.extend(written);

    let wide = tiles.iter().any(|(_, kind)| *kind == Ty::Int);
    let mut kernel = Kernel::default();
    let mut counts = vec![];
    for (edge, side, count) in [("X", x, edges[0]), ("Y", y, edges[1])] {
        if count < side {
            // What fits into shared memory whatever the other side is.
            let most = if tiles.len() > 1 || edge == "X" { 64 } else { 128 };
            let others =
                [32, 64, 128].into_iter().filter(|&o| o != count && o < side && o <= most && count <= 64 && !wide);
            let name = format!("{upper}_{edge}");
            kernel.knobs.push(Knob { name, default: count, others: others.collect() });
            counts.push(format!("blocks({side}, min({side}, TUNE[\"{upper}_{edge}\"]))"));
        } else {
            counts.push("1".into());
        }
    }
    kernel.knobs.push(Knob { name: format!("{upper}_THREADS"), default: 256, others: vec![128, 512] });
    let mut reads = first.reads.clone();
    reads.extend(second.reads.iter().copied().filter(|vid| !first.reads.contains(vid)));
    second.reads = reads;
    counts.push(rest.to_string());
    let counts: Vec<String> = counts.into_iter().filter(|count| count != "1").collect();
    let grid = if counts.is_empty() { "1".into() } else { counts.join(" * ") };
    launch(
        &mut kernel,
        &second,
        spec,
        &spec.name,
        &[],
        format!("__launch_bounds__({upper}_THREADS) "),
        &text,
        grid,
        format!("TUNE[\"{upper}_THREADS\"]"),
        true,
    );
    kernel.reads.clone_from(&second.reads);
    Ok(kernel)
}
