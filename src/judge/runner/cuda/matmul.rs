//! Matrix products by cuBLASLt: `out = a @ b (+ bias)` with the layouts that strides say.
//!
//! `layout` decides without a device how row-major tensors become cuBLASLt's column-major matrices: a product
//! with rows of `out` contiguous is computed as its transpose, `out^T = b^T a^T`, so that a bias along the
//! last dimension lies along the rows of the result, which is where the epilogue adds it.

use std::ffi::c_void;

use cudarc::cublaslt::sys;

use super::super::{Arithmetic, Fault};
use super::library::{Libraries, check};
use crate::plan::{Dtype, TensorRef};

/// Scratch memory for a product, as PyTorch gives it on this generation of cards.
pub const WORKSPACE: u64 = 32 << 20;

/// One matrix in column-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    pub rows: u64,
    pub cols: u64,
    pub leading: i64,
    pub batch_stride: i64,
    /// The operation takes its transpose.
    pub transposed: bool,
}

/// A product as cuBLASLt takes it: `d = op(a) op(b)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub a: Matrix,
    pub b: Matrix,
    pub d: Matrix,
    pub batch: i32,
    /// `a` of cuBLASLt is the plan's `b`.
    pub swapped: bool,
}

struct View {
    rows: u64,
    cols: u64,
    row_stride: u64,
    col_stride: u64,
    batch: u64,
    batch_stride: u64,
}

fn view(tensor: &TensorRef, name: &str) -> Result<View, Fault> {
    let bad = || Fault::new("library_failed", format!("matmul: `{name}` must have 2 or 3 dimensions"));
    match (tensor.shape.as_slice(), tensor.strides.as_slice()) {
        (&[rows, cols], &[row_stride, col_stride]) => {
            Ok(View { rows, cols, row_stride, col_stride, batch: 1, batch_stride: 0 })
        }
        (&[batch, rows, cols], &[batch_stride, row_stride, col_stride]) => {
            Ok(View { rows, cols, row_stride, col_stride, batch, batch_stride })
        }
        _ => Err(bad()),
    }
}

impl View {
    fn transpose(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// As a column-major matrix: columns contiguous, the next column `leading` elements on.
    fn column_major(&self, transposed: bool) -> Option<Matrix> {
        let contiguous = self.row_stride == 1 || self.rows == 1;
        let leading = if self.cols == 1 { self.rows.max(1) } else { self.col_stride };
        if !contiguous || leading < self.rows {
            return None;
        }
        Some(Matrix {
            rows: self.rows,
            cols: self.cols,
            leading: i64::try_from(leading).ok()?,
            batch_stride: i64::try_from(self.batch_stride).ok()?,
            transposed,
        })
    }

    /// As an operand: itself where it is column-major, its transpose where that is.
    fn operand(self) -> Option<Matrix> {
        self.column_major(false).or_else(|| self.transpose().column_major(true))
    }
}

/// The layout of a product.
///
/// # Errors
/// `library_failed` where shapes don't fit or no dimension of a matrix is contiguous.
pub fn layout(a: &TensorRef, b: &TensorRef, bias: Option<&TensorRef>, out: &TensorRef) -> Result<Layout, Fault> {
    let refuse = |why: &str| Err(Fault::new("library_failed", format!("matmul: {why}")));
    let (va, vb, vo) = (view(a, "a")?, view(b, "b")?, view(out, "out")?);
    if va.cols != vb.rows || vo.rows != va.rows || vo.cols != vb.cols || va.cols == 0 {
        return refuse(&format!("shapes {:?} and {:?} don't give {:?}", a.shape, b.shape, out.shape));
    }
    let broadcast = |v: &View| v.batch == vo.batch || v.batch == 1;
    if !broadcast(&va) || !broadcast(&vb) {
        return refuse("batches differ");
    }
    let Ok(batch) = i32::try_from(vo.batch) else {
        return refuse("the batch is over 2^31");
    };
    if let Some(bias) = bias
        && (bias.shape != [vo.cols] || (bias.strides != [1] && vo.cols != 1) || bias.dtype != out.dtype)
    {
        return refuse("the bias must be contiguous, as long as the last dimension and of the output's type");
    }
    let single = |mut m: Matrix, v_batch: u64| {
        if v_batch == 1 {
            m.batch_stride = 0;
        }
        m
    };
    let (batch_a, batch_b, batch_o) = (va.batch, vb.batch, vo.batch);
    let contiguous = "one of the last two dimensions of each operand must be contiguous";
    let (rows, cols) = (vo.rows, vo.cols);
    // The transpose first: it is the usual case, and the only one whose epilogue can add the bias.
    let vo = vo.transpose();
    if let Some(d) = vo.column_major(false) {
        let (Some(lt_a), Some(lt_b)) = (vb.transpose().operand(), va.transpose().operand()) else {
            return refuse(contiguous);
        };
        return Ok(Layout {
            a: single(lt_a, batch_b),
            b: single(lt_b, batch_a),
            d: single(d, batch_o),
            batch,
            swapped: true,
        });
    }
    let Some(d) = vo.transpose().column_major(false) else {
        return refuse("one of the last two dimensions of the output must be contiguous");
    };
    if bias.is_some() {
        return refuse(&format!("a bias needs an output whose rows are contiguous ({rows} x {cols})"));
    }
    let (Some(lt_a), Some(lt_b)) = (va.operand(), vb.operand()) else {
        return refuse(contiguous);
    };
    Ok(Layout { a: single(lt_a, batch_a), b: single(lt_b, batch_b), d: single(d, batch_o), batch, swapped: false })
}

/// A prepared product.
pub struct Matmul {
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    a: u64,
    b: u64,
    d: u64,
    double: bool,
}

fn data_type(dtype: Dtype) -> Result<(sys::cudaDataType, bool), Fault> {
    Ok(match dtype {
        Dtype::Float32 => (sys::cudaDataType_t::CUDA_R_32F, false),
        Dtype::Float16 => (sys::cudaDataType_t::CUDA_R_16F, false),
        Dtype::Bfloat16 => (sys::cudaDataType_t::CUDA_R_16BF, false),
        Dtype::Float64 => (sys::cudaDataType_t::CUDA_R_64F, true),
        other => return Err(Fault::new("library_failed", format!("matmul: no product of {other:?}"))),
    })
}

/// Largest power of two, up to 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn bytes_of<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

impl Matmul {
    /// Chooses the algorithm: the first that the library's own heuristics propose, as PyTorch does.
    /// `at` gives the address of a tensor.
    ///
    /// # Errors
    /// `library_failed` where the library has none.
    pub fn new(
        libraries: &mut Libraries,
        (a, b, bias, out): (&TensorRef, &TensorRef, Option<&TensorRef>, &TensorRef),
        arithmetic: Arithmetic,
        at: impl Fn(&TensorRef) -> Result<u64, Fault>,
    ) -> Result<Option<Self>, Fault> {
        if out.shape.contains(&0) {
            return Ok(None);
        }
        if a.dtype != out.dtype || b.dtype != out.dtype {
            return Err(Fault::new("library_failed", "matmul: operands and output must have one type"));
        }
        let layout = layout(a, b, bias, out)?;
        let (kind, double) = data_type(out.dtype)?;
        let compute = match out.dtype {
            Dtype::Float64 => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            Dtype::Float32 if arithmetic.matmul_tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = if double { sys::cudaDataType_t::CUDA_R_64F } else { sys::cudaDataType_t::CUDA_R_32F };
        let (first, second) = if layout.swapped { (b, a) } else { (a, b) };
        let (a, b, d) = (at(first)?, at(second)?, at(out)?);
        let (table, handle) = libraries.lt()?;

        let mut desc = std::ptr::null_mut();
        // SAFETY: `desc` is valid for a write.
        check(unsafe { (table.cublasLtMatmulDescCreate)(&raw mut desc, compute, scale) }, "describing a product")?;
        let set = |which, (value, size): (*const c_void, usize)| {
            // SAFETY: `desc` was created above; `value` is valid for `size` bytes, which the library copies.
            check(unsafe { (table.cublasLtMatmulDescSetAttribute)(desc, which, value, size) }, "describing a product")
        };
        use sys::cublasLtMatmulDescAttributes_t as Desc;
        // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
        set(Desc::CUBLASLT_MATMUL_DESC_TRANSA, bytes_of(&i32::from(layout.a.transposed)))?;
        set(Desc::CUBLASLT_MATMUL_DESC_TRANSB, bytes_of(&i32::from(layout.b.transposed)))?;
        if let Some(bias) = bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            set(Desc::CUBLASLT_MATMUL_DESC_EPILOGUE, bytes_of(&epilogue))?;
            set(Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bytes_of(&at(bias)?))?;
        }
        let matrix = |m: Matrix| {
            let mut made = std::ptr::null_mut();
            // SAFETY: `made` is valid for a write.
            let status = unsafe { (table.cublasLtMatrixLayoutCreate)(&raw mut made, kind, m.rows, m.cols, m.leading) };
            check(status, "describing a matrix")?;
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            for (which, (value, size)) in [
                (Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, bytes_of(&layout.batch)),
                (Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, bytes_of(&m.batch_stride)),
            ] {
                // SAFETY: `made` was created above; `value` is valid for `size` bytes, which the library copies.
                let status = unsafe { (table.cublasLtMatrixLayoutSetAttribute)(made, which, value, size) };
                check(status, "describing a matrix")?;
            }
            Ok::<_, Fault>(made)
        };
        let layouts = [matrix(layout.a)?, matrix(layout.b)?, matrix(layout.d)?];

        let mut preference = std::ptr::null_mut();
        // SAFETY: `preference` is valid for a write.
        let status = unsafe { (table.cublasLtMatmulPreferenceCreate)(&raw mut preference) };
        check(status, "choosing an algorithm")?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        for (which, (value, size)) in [
            (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes_of(&WORKSPACE)),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, bytes_of(&alignment(a))),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes_of(&alignment(b))),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, bytes_of(&alignment(d))),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, bytes_of(&alignment(d))),
        ] {
            // SAFETY: `preference` was created above; `value` is valid for `size` bytes, copied by the library.
            let status = unsafe { (table.cublasLtMatmulPreferenceSetAttribute)(preference, which, value, size) };
            check(status, "choosing an algorithm")?;
        }
        // SAFETY: plain data for the library to fill in; zero is a member of its enumeration (success).
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let [la, lb, ld] = layouts;
        // SAFETY: all descriptions live; room for one result is announced.
        let status = unsafe {
            (table.cublasLtMatmulAlgoGetHeuristic)(
                handle,
                desc,
                la,
                lb,
                ld,
                ld,
                preference,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        // SAFETY: created above, not used any more.
        let _ = unsafe { (table.cublasLtMatmulPreferenceDestroy)(preference) };
        check(status, "choosing an algorithm for a product")?;
        if count == 0 {
            let what = if bias.is_some() { " with a bias" } else { "" };
            return Err(Fault::new("library_failed", format!("cuBLASLt has no algorithm for this product{what}")));
        }
        Ok(Some(Self { desc, layouts, algorithm: found.algo, a, b, d, double }))
    }

    /// Puts the product on the stream.
    ///
    /// # Errors
    /// `library_failed`.
    pub fn issue(&self, libraries: &Libraries, scratch: u64, stream: *mut c_void) -> Result<(), Fault> {
        let (table, handle) = libraries.ready_lt()?;
        let (one, zero, one64, zero64) = (1f32, 0f32, 1f64, 0f64);
        let (alpha, beta): (*const c_void, *const c_void) = if self.double {
            ((&raw const one64).cast(), (&raw const zero64).cast())
        } else {
            ((&raw const one).cast(), (&raw const zero).cast())
        };
        let [la, lb, ld] = self.layouts;
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: descriptions were made for exactly these matrices; alpha and beta are host pointers of the
        // scale type and read before the call returns (pointer mode host is the default); `scratch` has
        // WORKSPACE bytes. With beta 0, `c` is not read, and may be `d`.
        let status = unsafe {
            (table.cublasLtMatmul)(
                handle,
                self.desc,
                alpha,
                pointer(self.a),
                la,
                pointer(self.b),
                lb,
                beta,
                pointer(self.d),
                ld,
                pointer(self.d),
                ld,
                &raw const self.algorithm,
                pointer(scratch),
                usize::try_from(WORKSPACE).unwrap_or(0),
                stream.cast(),
            )
        };
        check(status, "a matrix product")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tensor(shape: &[u64], strides: &[u64]) -> TensorRef {
        TensorRef { buffer: 0, offset: 0, dtype: Dtype::Float32, shape: shape.into(), strides: strides.into() }
    }

    /// Element (batch, row, column) of `op(m)`, as a position in memory.
    fn position(m: Matrix, batch: u64, row: u64, col: u64) -> u64 {
        let (r, c) = if m.transposed { (col, row) } else { (row, col) };
        assert!(r < m.rows && c < m.cols, "inside");
        batch * m.batch_stride as u64 + c * m.leading as u64 + r
    }

    fn agrees(a: &TensorRef, b: &TensorRef, out: &TensorRef) -> Layout {
        let l = layout(a, b, None, out).unwrap();
        let at = |t: &TensorRef, batch: u64, i: u64, j: u64| {
            let n = t.shape.len();
            let first = if n == 3 && t.shape[0] > 1 { batch * t.strides[0] } else { 0 };
            first + i * t.strides[n - 2] + j * t.strides[n - 1]
        };
        let (m, k) = (a.shape[a.shape.len() - 2], a.shape[a.shape.len() - 1]);
        let n = *b.shape.last().unwrap();
        for batch in 0..l.batch as u64 {
            for i in 0..m {
                for j in 0..n {
                    let d = if l.swapped { position(l.d, batch, j, i) } else { position(l.d, batch, i, j) };
                    assert_eq!(d, at(out, batch, i, j));
                    for x in 0..k {
                        let (pa, pb) = if l.swapped {
                            (position(l.b, batch, x, i), position(l.a, batch, j, x))
                        } else {
                            (position(l.a, batch, i, x), position(l.b, batch, x, j))
                        };
                        assert_eq!((pa, pb), (at(a, batch, i, x), at(b, batch, x, j)));
                    }
                }
            }
        }
        l
    }

    #[test]
    fn every_order_of_operands_reads_and_writes_the_elements_that_strides_say() {
        let orders = |r: u64, c: u64| [vec![c, 1], vec![1, r], vec![c + 3, 1], vec![1, r + 5]];
        for sa in orders(3, 4) {
            for sb in orders(4, 5) {
                for so in orders(3, 5) {
                    let l = agrees(&tensor(&[3, 4], &sa), &tensor(&[4, 5], &sb), &tensor(&[3, 5], &so));
                    assert_eq!(l.swapped, so[1] == 1);
                }
            }
        }
    }

    #[test]
    fn batches_and_broadcast_batches_keep_their_strides() {
        let l = agrees(
            &tensor(&[2, 3, 4], &[12, 4, 1]),
            &tensor(&[2, 4, 5], &[20, 1, 4]),
            &tensor(&[2, 3, 5], &[15, 5, 1]),
        );
        assert_eq!(l.batch, 2);
        agrees(&tensor(&[2, 3, 4], &[12, 4, 1]), &tensor(&[1, 4, 5], &[20, 5, 1]), &tensor(&[2, 3, 5], &[15, 5, 1]));
        agrees(&tensor(&[2, 3, 4], &[12, 4, 1]), &tensor(&[4, 5], &[5, 1]), &tensor(&[2, 3, 5], &[15, 5, 1]));
    }

    #[test]
    fn vectors_have_a_leading_dimension_that_the_library_takes() {
        for (m, k, n) in [(1, 4, 5), (3, 4, 1), (1, 4, 1), (3, 1, 5), (1, 1, 1)] {
            let l = agrees(&tensor(&[m, k], &[k, 1]), &tensor(&[k, n], &[n, 1]), &tensor(&[m, n], &[n, 1]));
            for matrix in [l.a, l.b, l.d] {
                assert!(matrix.leading >= matrix.rows as i64);
            }
        }
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        let (a, b, out) = (tensor(&[3, 4], &[4, 1]), tensor(&[4, 5], &[5, 1]), tensor(&[3, 5], &[1, 3]));
        assert!(layout(&a, &b, Some(&tensor(&[5], &[1])), &out).unwrap_err().message.contains("bias"));
        assert!(layout(&a, &tensor(&[5, 5], &[5, 1]), None, &out).is_err());
        assert!(layout(&tensor(&[3, 4], &[8, 2]), &b, None, &out).is_err());
        assert!(layout(&a, &b, None, &tensor(&[3, 5], &[10, 2])).is_err());
    }

    #[test]
    fn the_alignment_of_an_address_is_a_power_of_two_up_to_256() {
        assert_eq!((alignment(0x20_0000), alignment(0x20_0010), alignment(0x20_0004)), (256, 16, 4));
    }
}
