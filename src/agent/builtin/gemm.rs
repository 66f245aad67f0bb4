//! Matrix products in single precision on tensor cores: which are worth writing, their tiles and launches.
//!
//! Knows what `gemm.cu` can take. Must not know where operands come from.

/// The kernel that all products of a candidate share.
pub const KERNEL: &str = include_str!("gemm.cu");

/// What a use of it looks like in a source.
pub const CALL: &str = "gemm<";

/// Terms that are in shared memory at once, as in `gemm.cu`.
const TERMS: i64 = 32;

/// Tiles that are on their way at once.
const STAGES: i64 = 4;

/// Terms from which on the products, not the operands and results, are what takes time.
const LONG: i64 = 512;

/// Multiplications below which launching is what counts.
const WORTH: i64 = 1 << 28;

/// A product of the form `(batch x) m x k` by `k x n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    pub batch: i64,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// The operands lie along k; else along m, or n.
    pub a_along_k: bool,
    pub b_along_k: bool,
    /// Results of a block, and of a warp.
    tile: (i64, i64),
    warp: (i64, i64),
}

impl Product {
    /// The product with `shape` as its result (2 or 3 dimensions), if the kernel can take it and there is enough of it
    /// to fill the card.
    pub fn fit(shape: &[i64], k: i64, a_along_k: bool, b_along_k: bool, multiprocessors: i64) -> Option<Self> {
        let (batch, m, n) = match *shape {
            [m, n] => (1, m, n),
            [batch, m, n] => (batch, m, n),
            _ => return None,
        };
        // Operands are read 16 bytes at a time, results written 8 at a time.
        let fits = |size: i64| size % 4 == 0;
        let whole = fits(if a_along_k { k } else { m }) && fits(if b_along_k { k } else { n }) && n % 2 == 0;
        let small = [m, n, k, batch].iter().all(|&size| size > 0 && size < 1 << 30);
        if !whole
            || !small
            || k < LONG
            || batch > 65535
            || m.checked_mul(n)?.checked_mul(k)?.checked_mul(batch)? < WORTH
        {
            return None;
        }
        let blocks = |side: i64| ((m + side - 1) / side).saturating_mul((n + side - 1) / side).saturating_mul(batch);
        let (tile, warp) = if blocks(128) >= multiprocessors * 3 / 4 {
            ((128, 128), (64, 32))
        } else if blocks(64) >= multiprocessors / 2 {
            ((64, 64), (32, 32))
        } else {
            return None;
        };
        Some(Self { batch, m, n, k, a_along_k, b_along_k, tile, warp })
    }

    fn threads(&self) -> i64 {
        self.tile.0 / self.warp.0 * (self.tile.1 / self.warp.1) * 32
    }

    /// Bytes of shared memory.
    fn shared(&self) -> i64 {
        let floats = |rows: i64, along_k: bool| if along_k { rows * TERMS } else { TERMS * (rows + 8) };
        4 * STAGES * (floats(self.tile.0, self.a_along_k) + floats(self.tile.1, self.b_along_k))
    }

    /// The kernel `name`, and grid, block and shared memory of its launch in Python.
    pub fn write(&self, name: &str, bias: bool, comment: &str) -> (String, String) {
        let Self { batch, m, n, k, a_along_k, b_along_k, tile, warp } = self;
        let threads = self.threads();
        let (parameter, given) = if bias { ("const float* bias, ", "bias") } else { ("", "nullptr") };
        let source = format!(
            "// {comment}\nextern \"C\" __global__ void __launch_bounds__({threads})\n    \
             {name}(const float* a, const float* b, {parameter}float* c) {{\n  \
             extern __shared__ float shared[];\n  \
             gemm<{}, {}, {}, {}, {STAGES}, {a_along_k}, {b_along_k}>(a, b, {given}, c, {m}, {n}, {k}, shared);\n}}\n\n",
            tile.0, tile.1, warp.0, warp.1
        );
        let blocks = ((m + tile.0 - 1) / tile.0) * ((n + tile.1 - 1) / tile.1);
        let grid = if *batch == 1 { blocks.to_string() } else { format!("({blocks}, {batch})") };
        (source, format!("{grid}, {threads}, {}", self.shared()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_odd_and_narrow_products_stay_with_the_library() {
        assert!(Product::fit(&[1024, 8192], 8192, true, true, 132).is_some());
        assert!(Product::fit(&[1024, 8192], 8190, true, true, 132).is_none(), "k is no multiple of 4");
        assert!(Product::fit(&[1022, 8192], 8190, false, false, 132).is_none(), "m is no multiple of 4");
        assert!(Product::fit(&[64, 64], 64, true, true, 132).is_none(), "too little work");
        assert!(Product::fit(&[32_768, 32_768], 64, true, false, 132).is_none(), "bound by its results");
        assert!(Product::fit(&[256, 256], 524_288, true, false, 132).is_none(), "too few blocks");
        assert!(Product::fit(&[128, 512, 2048], 1024, true, false, 132).is_some_and(|p| p.batch == 128));
    }

    #[test]
    fn tiles_fit_into_shared_memory() {
        for (a, b) in [(true, true), (true, false), (false, true), (false, false)] {
            let product = Product::fit(&[4096, 4096], 4096, a, b, 132).unwrap();
            assert!(product.shared() <= 227 * 1024);
            assert_eq!(product.threads(), 256);
        }
        assert_eq!(Product::fit(&[1024, 512], 4096, true, true, 132).unwrap().threads(), 128);
    }
}
