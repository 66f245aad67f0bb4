//! Index expressions: where in a tensor an element of a kernel's iteration space lies.
//!
//! Knows integers and iteration variables: a coordinate is a sum of multiples of variables, and views are
//! maps from coordinates to coordinates, worked out symbolically so that a transpose, a slice or a reshape
//! costs nothing at run time. Must not know tensors, kernels or languages.

use std::collections::BTreeMap;

/// A variable of the iteration space, by position in `Vars`.
pub type VarId = usize;

/// `constant + sum of factor * variable`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ix {
    pub constant: i64,
    pub terms: BTreeMap<VarId, i64>,
}

impl Ix {
    pub fn constant(value: i64) -> Self {
        Self { constant: value, terms: BTreeMap::new() }
    }

    pub fn var(var: VarId) -> Self {
        Self { constant: 0, terms: BTreeMap::from([(var, 1)]) }
    }

    pub fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        sum.constant += other.constant;
        for (&var, &factor) in &other.terms {
            let entry = sum.terms.entry(var).or_insert(0);
            *entry += factor;
            if *entry == 0 {
                sum.terms.remove(&var);
            }
        }
        sum
    }

    pub fn offset(&self, by: i64) -> Self {
        Self { constant: self.constant + by, terms: self.terms.clone() }
    }

    pub fn times(&self, factor: i64) -> Self {
        if factor == 0 {
            return Self::default();
        }
        Self {
            constant: self.constant * factor,
            terms: self.terms.iter().map(|(&var, &coefficient)| (var, coefficient * factor)).collect(),
        }
    }

    pub fn coefficient(&self, var: VarId) -> i64 {
        self.terms.get(&var).copied().unwrap_or(0)
    }

    pub fn without(&self, var: VarId) -> Self {
        let mut rest = self.clone();
        rest.terms.remove(&var);
        rest
    }
}

/// How a variable gets its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VarKind {
    /// A loop or a thread index.
    Loop,
    /// `ix / divisor`, where no symbolic division was possible.
    Quotient(Ix, i64),
    /// `ix % divisor`.
    Remainder(Ix, i64),
    /// An index that was loaded from memory; the emitter knows its name.
    Loaded,
}

/// One variable: its name in the kernel, its range `0..size`, the depth of the loop that sets it.
#[derive(Clone, Debug)]
pub struct Var {
    pub name: String,
    pub size: i64,
    pub level: usize,
    pub kind: VarKind,
}

/// Terms, constant and divisor of a division.
type Division = (Vec<(VarId, i64)>, i64, i64);

/// The variables of one kernel.
#[derive(Clone, Debug, Default)]
pub struct Vars {
    pub list: Vec<Var>,
    divisions: BTreeMap<Division, (VarId, VarId)>,
}

impl Vars {
    pub fn add(&mut self, name: impl Into<String>, size: i64, level: usize, kind: VarKind) -> VarId {
        self.list.push(Var { name: name.into(), size, level, kind });
        self.list.len() - 1
    }

    /// Deepest loop that `ix` depends on.
    pub fn level(&self, ix: &Ix) -> usize {
        ix.terms.keys().map(|&var| self.list[var].level).max().unwrap_or(0)
    }

    /// Sets the depth of loop variables anew, and with it that of everything that is worked out from them.
    pub fn relevel(&mut self, levels: &dyn Fn(VarId) -> Option<usize>) {
        for var in 0..self.list.len() {
            let level = match &self.list[var].kind {
                VarKind::Quotient(inner, _) | VarKind::Remainder(inner, _) => Some(self.level(inner)),
                VarKind::Loop | VarKind::Loaded => levels(var),
            };
            if let Some(level) = level {
                self.list[var].level = level;
            }
        }
    }

    /// Whether a value depends on one of these loop variables.
    pub fn depends(&self, ix: &Ix, on: &[VarId]) -> bool {
        ix.terms.keys().any(|&var| {
            on.contains(&var)
                || match &self.list[var].kind {
                    VarKind::Quotient(inner, _) | VarKind::Remainder(inner, _) => self.depends(inner, on),
                    // What was loaded may come from anywhere.
                    VarKind::Loaded => true,
                    VarKind::Loop => false,
                }
        })
    }

    /// Quotient and remainder by `divisor` of a value that is known not to be negative.
    pub fn divide(&mut self, ix: &Ix, divisor: i64) -> (Ix, Ix) {
        if divisor == 1 {
            return (ix.clone(), Ix::default());
        }
        let mut quotient = Ix::constant(ix.constant.div_euclid(divisor));
        let mut remainder = Ix::constant(ix.constant.rem_euclid(divisor));
        let mut largest = remainder.constant;
        let mut clean = true;
        for (&var, &factor) in &ix.terms {
            if factor % divisor == 0 {
                quotient.terms.insert(var, factor / divisor);
            } else {
                clean &= factor > 0;
                largest += factor * (self.list[var].size - 1);
                remainder.terms.insert(var, factor);
            }
        }
        if clean && largest < divisor {
            return (quotient, remainder);
        }
        let key = (ix.terms.iter().map(|(&var, &factor)| (var, factor)).collect(), ix.constant, divisor);
        let (q, r) = if let Some(&known) = self.divisions.get(&key) {
            known
        } else {
            let level = self.level(ix);
            let bound =
                ix.constant + ix.terms.iter().map(|(&var, &f)| f.max(0) * (self.list[var].size - 1)).sum::<i64>();
            let number = self.list.len();
            let q = self.add(format!("q{number}"), bound / divisor + 1, level, VarKind::Quotient(ix.clone(), divisor));
            let r = self.add(format!("r{number}"), divisor, level, VarKind::Remainder(ix.clone(), divisor));
            self.divisions.insert(key, (q, r));
            (q, r)
        };
        (Ix::var(q), Ix::var(r))
    }

    /// The same value, where a quotient and the remainder of one division belong together again.
    pub fn whole(&self, ix: &Ix) -> Ix {
        let mut ix = ix.clone();
        loop {
            let found = self.divisions.iter().find_map(|((terms, constant, divisor), (q, r))| {
                let factor = ix.coefficient(*r);
                (factor != 0 && ix.coefficient(*q) == factor * divisor)
                    .then(|| (*q, *r, factor, Ix { constant: *constant, terms: terms.iter().copied().collect() }))
            });
            let Some((q, r, factor, inner)) = found else { return ix };
            ix = ix.without(q).without(r).plus(&inner.times(factor));
        }
    }

    /// Coordinates in `to` of the element that has coordinates `at` in `from` (row-major reinterpretation).
    pub fn reshape(&mut self, at: &[Ix], from: &[i64], to: &[i64]) -> Vec<Ix> {
        let mut result = vec![Ix::default(); to.len()];
        let (mut i, mut k) = (0, 0);
        while i < from.len() || k < to.len() {
            // The smallest group of dimensions with equal products on both sides.
            let (first_i, first_k) = (i, k);
            let mut left = if i < from.len() { from[i] } else { 1 };
            let mut right = if k < to.len() { to[k] } else { 1 };
            i += usize::from(i < from.len());
            k += usize::from(k < to.len());
            while left != right {
                if left < right && i < from.len() {
                    left *= from[i];
                    i += 1;
                } else if right < left && k < to.len() {
                    right *= to[k];
                    k += 1;
                } else {
                    break;
                }
            }
            if i.min(from.len()) - first_i == 1 && k.min(to.len()) - first_k == 1 && from[first_i] == to[first_k] {
                result[first_k] = at[first_i].clone();
                continue;
            }
            let mut linear = Ix::default();
            for d in first_i..i {
                linear = linear.times(from[d]).plus(&at[d]);
            }
            let mut linear = self.whole(&linear);
            for d in (first_k..k).rev() {
                if to[d] == 1 {
                    continue;
                }
                // The outermost dimension of a group is what is left.
                if to[first_k..d].iter().product::<i64>() == 1 {
                    result[d] = linear.clone();
                    break;
                }
                let (quotient, remainder) = self.divide(&linear, to[d]);
                result[d] = remainder;
                linear = quotient;
            }
        }
        result
    }
}

/// Strides in elements of a contiguous tensor.
pub fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1].max(1);
    }
    strides
}

/// Number of elements.
pub fn numel(shape: &[i64]) -> i64 {
    shape.iter().product()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_a_merged_dimension_gives_back_its_parts_without_division() {
        let mut vars = Vars::default();
        let (n, c) = (vars.add("n", 8, 0, VarKind::Loop), vars.add("c", 16, 0, VarKind::Loop));
        let merged = vars.reshape(&[Ix::var(n), Ix::var(c)], &[8, 16], &[128]);
        assert_eq!(merged, [Ix::var(n).times(16).plus(&Ix::var(c))]);
        assert_eq!(vars.reshape(&merged, &[128], &[8, 16]), [Ix::var(n), Ix::var(c)]);
        assert_eq!(vars.reshape(&merged, &[128], &[8, 4, 4]).len(), 3);
    }

    #[test]
    fn a_division_that_is_undone_leaves_nothing_behind() {
        let mut vars = Vars::default();
        let (c, h) = (vars.add("c", 16, 0, VarKind::Loop), vars.add("h", 10, 0, VarKind::Loop));
        // Groups of 4 channels with all that is in them, and back.
        let grouped = vars.reshape(&[Ix::var(c), Ix::var(h)], &[16, 10], &[4, 40]);
        assert_ne!(grouped[0], Ix::var(c));
        assert_eq!(vars.reshape(&grouped, &[4, 40], &[16, 10]), [Ix::var(c), Ix::var(h)]);
    }

    #[test]
    fn size_one_dimensions_are_dropped_and_added_freely() {
        let mut vars = Vars::default();
        let (n, c) = (vars.add("n", 8, 0, VarKind::Loop), vars.add("c", 16, 0, VarKind::Loop));
        let at = vars.reshape(&[Ix::var(n), Ix::default(), Ix::var(c)], &[8, 1, 16], &[8, 16, 1, 1]);
        assert_eq!(at, [Ix::var(n), Ix::var(c), Ix::default(), Ix::default()]);
        assert_eq!(vars.reshape(&[Ix::default()], &[1], &[]), Vec::<Ix>::new());
    }
}
