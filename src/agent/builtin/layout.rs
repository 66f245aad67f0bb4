//! Channels last: a task whose dense convolutions work in the layout that a card's convolutions are written for.
//!
//! Rewrites the policy's form: operand and result of a convolution have their channels innermost, and so has all
//! that follows from the result element by element, by folds, by poolings and by views. What is left is one
//! conversion at each edge: an input, an output, a matrix product, a scan. Knows the meaning of values; must not
//! know kernels (`tile` makes conversions fast) nor when the layout is worth it (`propose` offers both).

use std::collections::HashMap;

use super::index::numel;
use super::ir::{Conv, Def, Fold, Ir, Vid, View};
use super::lower::Lowered;

/// Where the dimensions of a task's value are in the value that stands for it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    /// For each dimension those that it is made of, outermost first; all together are all of them.
    parts: Vec<Vec<usize>>,
    /// Sizes of the dimensions that the parts name.
    sizes: Vec<i64>,
}

/// What stands for a value of the task: a value of the same shape, or one in another layout.
#[derive(Clone, Debug)]
struct Form {
    vid: Vid,
    layout: Option<Layout>,
}

struct Pass<'a> {
    old: &'a Ir,
    ir: Ir,
    forms: HashMap<Vid, Form>,
    label: Option<String>,
    /// Channels of the convolutions that were rewritten, in and out.
    channels: Vec<(i64, i64)>,
}

/// The task with its dense convolutions channels-last, and their channels; nothing if there is none to rewrite.
pub fn channels_last(task: &Lowered) -> Option<(Lowered, Vec<(i64, i64)>)> {
    let mut pass = Pass { old: &task.ir, ir: Ir::default(), forms: HashMap::new(), label: None, channels: vec![] };
    for vid in 0..task.ir.vals.len() {
        pass.label = task.ir.labels.get(&vid).cloned();
        let form = pass.value(vid);
        pass.forms.insert(vid, form);
    }
    if pass.channels.is_empty() {
        return None;
    }
    pass.label = Some("permute".into());
    let outputs = task.outputs.iter().map(|&vid| pass.plain(vid)).collect();
    Some((Lowered { ir: pass.ir, outputs }, pass.channels))
}

impl Layout {
    /// Channels innermost, for a tensor of this shape.
    fn channels_last(shape: &[i64]) -> Self {
        let rank = shape.len();
        let mut parts = vec![vec![0], vec![rank - 1]];
        parts.extend((1..rank - 1).map(|d| vec![d]));
        let sizes = [0].into_iter().chain(2..rank).chain([1]).map(|d| shape[d]).collect();
        Self { parts, sizes }
    }

    /// The order in which the dimensions are those of the task.
    fn sequence(&self) -> Vec<usize> {
        self.parts.concat()
    }

    /// Elements are in the task's order: only dimensions of size one lie elsewhere.
    fn straight(&self) -> bool {
        self.sequence().into_iter().filter(|&d| self.sizes[d] != 1).is_sorted()
    }

    /// The same layout for a value of this shape, whose dimensions may be one where these are more.
    fn sized(&self, shape: &[i64]) -> Option<Self> {
        let mut sizes = vec![1; self.sizes.len()];
        for (dims, &size) in self.parts.iter().zip(shape) {
            if dims.iter().map(|&d| self.sizes[d]).product::<i64>() == size {
                dims.iter().for_each(|&d| sizes[d] = self.sizes[d]);
            } else if let [d] = dims[..] {
                sizes[d] = size;
            } else if size != 1 {
                return None;
            }
        }
        Some(Self { parts: self.parts.clone(), sizes })
    }

    /// The layout after a reshape in the task's coordinates: dimensions are cut where the new shape cuts them.
    fn reshaped(&self, shape: &[i64]) -> Option<Self> {
        // Pieces in the task's order: the dimension each comes from, and its size.
        let mut left: Vec<(usize, i64)> = self.sequence().into_iter().rev().map(|d| (d, self.sizes[d])).collect();
        let mut pieces: Vec<(usize, i64, usize)> = vec![];
        for (to, &size) in shape.iter().enumerate() {
            let mut rest = size;
            while rest > 1 {
                let (d, piece) = left.pop()?;
                if rest % piece == 0 {
                    pieces.push((d, piece, to));
                    rest /= piece;
                } else if piece % rest == 0 {
                    pieces.push((d, rest, to));
                    left.push((d, piece / rest));
                    rest = 1;
                } else {
                    return None;
                }
            }
        }
        if left.iter().any(|(_, size)| *size != 1) {
            return None;
        }
        // Pieces of one dimension stay beside each other, outermost first: sorting is stable.
        let mut order: Vec<usize> = (0..pieces.len()).filter(|&k| pieces[k].1 != 1).collect();
        order.sort_by_key(|&k| pieces[k].0);
        let mut parts = vec![vec![]; shape.len()];
        for (k, &(_, size, to)) in pieces.iter().enumerate() {
            if size != 1 {
                parts[to].extend(order.iter().position(|&o| o == k));
            }
        }
        Some(Self { parts, sizes: order.iter().map(|&k| pieces[k].1).collect() })
    }
}

impl Pass<'_> {
    fn add(&mut self, def: Def, shape: Vec<i64>, vid: Vid) -> Vid {
        let new = self.ir.add(def, shape, self.old.vals[vid].dtype);
        self.name(new);
        new
    }

    /// Labels are those of the operator that a value comes from.
    fn name(&mut self, vid: Vid) {
        if let Some(label) = &self.label {
            self.ir.labels.entry(vid).or_insert_with(|| label.clone());
        }
    }

    fn shape(&self, vid: Vid) -> Vec<i64> {
        self.old.shape(vid).to_vec()
    }

    /// A form; where its elements are in the task's order anyhow, it is a reshape away from being plain.
    fn form(&mut self, vid: Vid, layout: Layout, old: Vid) -> Form {
        if layout.straight() {
            let vid = self.ir.reshape(vid, self.shape(old));
            self.name(vid);
            return Form { vid, layout: None };
        }
        Form { vid, layout: Some(layout) }
    }

    /// A value of the task in the task's own shape.
    fn plain(&mut self, old: Vid) -> Vid {
        let form = self.forms[&old].clone();
        let Some(layout) = form.layout else { return form.vid };
        let ordered = self.ir.permute(form.vid, layout.sequence());
        let vid = self.ir.reshape(ordered, self.shape(old));
        for vid in [ordered, vid] {
            self.ir.labels.entry(vid).or_insert_with(|| "permute".into());
        }
        vid
    }

    /// A value of the task in a layout that was sized for it.
    fn in_layout(&mut self, old: Vid, layout: &Layout) -> Vid {
        let form = self.forms[&old].clone();
        if form.layout.as_ref() == Some(layout) || matches!(self.ir.def(form.vid), Def::Num(_)) {
            return form.vid;
        }
        let plain = self.plain(old);
        let sequence = layout.sequence();
        let cut = self.ir.reshape(plain, sequence.iter().map(|&d| layout.sizes[d]).collect());
        let mut order = vec![0; sequence.len()];
        for (place, &d) in sequence.iter().enumerate() {
            order[d] = place;
        }
        let vid = self.ir.permute(cut, order);
        for vid in [cut, vid] {
            self.ir.labels.entry(vid).or_insert_with(|| "channels_last".into());
        }
        vid
    }

    /// The value with its arguments in the task's own shapes.
    fn copied(&mut self, vid: Vid) -> Form {
        let def = match self.old.def(vid).clone() {
            Def::Point(op, args) => Def::Point(op, args.into_iter().map(|arg| self.plain(arg)).collect()),
            Def::View(source, view) => {
                let source = self.plain(source);
                // Views of views are joined, as when they were first made.
                let new = match view {
                    View::Reshape => self.ir.reshape(source, self.shape(vid)),
                    View::Permute(order) => self.ir.permute(source, order),
                    other => self.add(Def::View(source, other), self.shape(vid), vid),
                };
                self.name(new);
                return Form { vid: new, layout: None };
            }
            Def::Reduce { fold, arg, dims } => Def::Reduce { fold, arg: self.plain(arg), dims },
            Def::Result(fold, k) => Def::Result(self.forms[&fold].vid, k),
            Def::Pool { arg, weight, fold, window, dims } => {
                Def::Pool { arg: self.plain(arg), weight: weight.map(|weight| self.plain(weight)), fold, window, dims }
            }
            Def::Scan { arg, dim, fold, reverse } => Def::Scan { arg: self.plain(arg), dim, fold, reverse },
            Def::Cat(parts, dim) => Def::Cat(parts.into_iter().map(|part| self.plain(part)).collect(), dim),
            Def::Gather { source, index, dim } => {
                Def::Gather { source: self.plain(source), index: self.plain(index), dim }
            }
            Def::Matmul { a, b, bias } => {
                Def::Matmul { a: self.plain(a), b: self.plain(b), bias: bias.map(|bias| self.plain(bias)) }
            }
            Def::Convolution { x, weight, bias, conv } => Def::Convolution {
                x: self.plain(x),
                weight: self.plain(weight),
                bias: bias.map(|bias| self.plain(bias)),
                conv,
            },
            leaf @ (Def::Input(..) | Def::Param(..) | Def::Num(_) | Def::Coord(_)) => leaf,
        };
        Form { vid: self.add(def, self.shape(vid), vid), layout: None }
    }

    fn value(&mut self, vid: Vid) -> Form {
        self.moved(vid).unwrap_or_else(|| self.copied(vid))
    }

    /// The value in the layout of its arguments, if that is another than the task's and can be kept.
    fn moved(&mut self, vid: Vid) -> Option<Form> {
        let shape = self.shape(vid);
        match self.old.def(vid).clone() {
            Def::Convolution { x, weight, bias, conv } => {
                if !self.rewritable(vid, x, weight, &conv) {
                    return None;
                }
                self.channels.push((self.old.shape(x)[1], shape[1]));
                let from = Layout::channels_last(self.old.shape(x));
                let to = Layout::channels_last(&shape);
                let x = self.in_layout(x, &from);
                let (weight, bias) = (self.plain(weight), bias.map(|bias| self.plain(bias)));
                let def = Def::Convolution { x, weight, bias, conv: Conv { channels_last: true, ..conv } };
                let new = self.add(def, to.sizes.clone(), vid);
                Some(self.form(new, to, vid))
            }
            Def::Point(op, args) => {
                let layout = args.iter().find_map(|arg| self.forms[arg].layout.clone())?;
                let args = args.into_iter().map(|arg| self.in_layout(arg, &layout)).collect();
                let new = self.add(Def::Point(op, args), layout.sizes.clone(), vid);
                Some(Form { vid: new, layout: Some(layout) })
            }
            Def::Reduce { fold, arg, dims } => {
                let form = self.forms[&arg].clone();
                let layout = form.layout?;
                let folded: Vec<usize> = dims.iter().flat_map(|&d| layout.parts[d].clone()).collect();
                let folded: Vec<usize> = folded.into_iter().filter(|&d| layout.sizes[d] != 1).collect();
                // A place among several dimensions counts in the task's order.
                if matches!(fold, Fold::ArgMax | Fold::ArgMin) && !folded.is_sorted() {
                    return None;
                }
                let mut dims = folded;
                dims.sort_unstable();
                let mut sizes = layout.sizes.clone();
                dims.iter().for_each(|&d| sizes[d] = 1);
                let new = self.add(Def::Reduce { fold, arg: form.vid, dims }, sizes.clone(), vid);
                Some(Form { vid: new, layout: Some(Layout { parts: layout.parts, sizes }) })
            }
            Def::Result(fold, k) => {
                let form = self.forms[&fold].clone();
                let layout = form.layout?;
                let new = self.add(Def::Result(form.vid, k), layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
            Def::Pool { arg, weight: None, fold, window, dims } => {
                let form = self.forms[&arg].clone();
                let layout = form.layout?;
                let dims = self.single(&layout, &dims)?;
                let layout = layout.sized(&shape)?;
                let new =
                    self.add(Def::Pool { arg: form.vid, weight: None, fold, window, dims }, layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
            Def::Cat(parts, dim) => {
                let layout = parts.iter().find_map(|part| self.forms[part].layout.clone())?;
                let along = self.single(&layout, &[dim])?[0];
                let mut args = vec![];
                for part in parts {
                    let own = layout.sized(self.old.shape(part))?;
                    args.push(self.in_layout(part, &own));
                }
                let layout = layout.sized(&shape)?;
                let new = self.add(Def::Cat(args, along), layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
            Def::View(source, view) => self.viewed(vid, source, view),
            _ => None,
        }
    }

    fn viewed(&mut self, vid: Vid, source: Vid, view: View) -> Option<Form> {
        let shape = self.shape(vid);
        let form = self.forms[&source].clone();
        let layout = form.layout?;
        match view {
            // Nothing moves: the dimensions have other names.
            View::Permute(order) => {
                let parts = order.iter().map(|&d| layout.parts[d].clone()).collect();
                Some(self.form(form.vid, Layout { parts, sizes: layout.sizes }, vid))
            }
            View::Reshape => {
                let layout = layout.reshaped(&shape)?;
                let new = self.ir.reshape(form.vid, layout.sizes.clone());
                self.name(new);
                Some(self.form(new, layout, vid))
            }
            View::Expand => {
                let grown: Vec<usize> = (0..shape.len()).filter(|&d| shape[d] != self.old.shape(source)[d]).collect();
                self.single(&layout, &grown)?;
                let layout = layout.sized(&shape)?;
                let new = self.add(Def::View(form.vid, View::Expand), layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
            View::Slice { dim, start, step } => {
                let dim = self.single(&layout, &[dim])?[0];
                let layout = layout.sized(&shape)?;
                let new = self.add(Def::View(form.vid, View::Slice { dim, start, step }), layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
            View::Flip(dims) => {
                let dims = self.single(&layout, &dims)?;
                let new = self.add(Def::View(form.vid, View::Flip(dims)), layout.sizes.clone(), vid);
                Some(self.form(new, layout, vid))
            }
        }
    }

    /// The dimensions that stand for these, if there is one for each.
    fn single(&self, layout: &Layout, dims: &[usize]) -> Option<Vec<usize>> {
        dims.iter().map(|&d| if let [one] = layout.parts[d][..] { Some(one) } else { None }).collect()
    }

    /// Dense convolutions over two or three dimensions. With one channel or one place both layouts are one, and a
    /// weight that isn't known from parameters alone can't be brought into another layout beforehand.
    fn rewritable(&self, vid: Vid, x: Vid, weight: Vid, conv: &Conv) -> bool {
        let (from, to) = (self.old.shape(x), self.old.shape(vid));
        matches!(from.len(), 4 | 5)
            && conv.groups == 1
            && from[1] > 1
            && numel(&from[2..]) > 1
            && numel(from) > 0
            && numel(to) > 0
            && matches!(self.old.def(weight), Def::Param(..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shape: &[i64]) -> Layout {
        Layout::channels_last(shape)
    }

    #[test]
    fn groups_of_channels_are_cut_out_of_the_innermost_dimension() {
        let groups = layout(&[2, 12, 5, 7]).reshaped(&[2, 3, 140]).unwrap();
        assert_eq!(groups.sizes, [2, 5, 7, 3, 4]);
        assert_eq!(groups.parts, [vec![0], vec![3], vec![4, 1, 2]]);
        assert_eq!(groups.reshaped(&[2, 12, 5, 7]).unwrap().parts, [vec![0], vec![3, 4], vec![1], vec![2]]);
        assert_eq!(layout(&[2, 12, 5, 7]).reshaped(&[2, 12, 35]).unwrap().parts, [vec![0], vec![3], vec![1, 2]]);
        assert_eq!(layout(&[2, 12, 5, 7]).reshaped(&[2, 8, 105 / 2]), None);
    }

    #[test]
    fn where_only_dimensions_of_size_one_lie_elsewhere_the_order_is_the_tasks() {
        assert!(!layout(&[2, 12, 5, 7]).straight());
        assert!(layout(&[2, 12, 1, 1]).straight());
        assert!(layout(&[2, 1, 5, 7]).straight());
        let flat = layout(&[2, 12, 5, 7]).reshaped(&[1, 24, 5, 7]).unwrap();
        assert_eq!(flat.parts, [vec![], vec![0, 3], vec![1], vec![2]]);
        let folded = Layout { sizes: vec![2, 1, 1, 12], ..flat };
        assert!(folded.straight());
    }
}
