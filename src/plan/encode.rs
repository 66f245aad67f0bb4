//! Arguments of a launch, checked against the sizes of a kernel's parameters and turned into bytes.
//!
//! Knows the rules of widths (`docs/interfaces.md`). Must not know where buffers lie: an address stays a buffer and an
//! offset until the runner puts it in.

use super::Arg;

/// One argument as the kernel's parameter holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// As many bytes as the parameter has, little endian.
    Bytes(Vec<u8>),
    /// Eight bytes: the address of the buffer plus `offset`.
    Pointer { buffer: usize, offset: u64 },
}

/// Encodes `args` for parameters of `sizes` bytes.
///
/// # Errors
/// A sentence that names the first argument that does not fit.
pub fn encode(args: &[Arg], sizes: &[u32]) -> Result<Vec<Encoded>, String> {
    if args.len() != sizes.len() {
        return Err(format!("{} arguments are given, the kernel takes {}", args.len(), sizes.len()));
    }
    args.iter()
        .zip(sizes)
        .enumerate()
        .map(|(n, (arg, size))| one(arg, *size).map_err(|why| format!("argument {n} {why}")))
        .collect()
}

fn one(arg: &Arg, size: u32) -> Result<Encoded, String> {
    let exact = |bytes: &[u8], kind: &str| {
        if bytes.len() == size as usize {
            Ok(Encoded::Bytes(bytes.to_vec()))
        } else {
            Err(format!("is {kind} of {} bytes, the kernel's parameter has {size}", bytes.len()))
        }
    };
    match *arg {
        Arg::Pointer { buffer, offset } => {
            if size == 8 {
                Ok(Encoded::Pointer { buffer, offset })
            } else {
                Err(format!("is a tensor, the kernel's parameter has {size} bytes where a pointer has 8"))
            }
        }
        Arg::Null => exact(&[0; 8], "a pointer"),
        Arg::Int(value) => integer(value, size),
        #[allow(clippy::cast_possible_truncation, reason = "a C float is asked for")]
        Arg::Float(value) => match size {
            8 => exact(&value.to_le_bytes(), "a double"),
            4 => exact(&(value as f32).to_le_bytes(), "a float"),
            _ => Err(format!("is a float, the kernel's parameter has {size} bytes; say kf.f16, kf.f32 or kf.f64")),
        },
        Arg::F16(value) => exact(&half(value).to_le_bytes(), "a half"),
        #[allow(clippy::cast_possible_truncation, reason = "a C float is asked for")]
        Arg::F32(value) => exact(&(value as f32).to_le_bytes(), "a float"),
        Arg::F64(value) => exact(&value.to_le_bytes(), "a double"),
        Arg::I32(value) => exact(&value.to_le_bytes(), "an int"),
        Arg::I64(value) => exact(&value.to_le_bytes(), "a 64-bit integer"),
        Arg::U32(value) => exact(&value.to_le_bytes(), "an unsigned int"),
        Arg::U8(value) => exact(&[value], "a byte"),
    }
}

/// An integer in `size` bytes, if the parameter, read as signed or as unsigned, can hold it.
fn integer(value: i64, size: u32) -> Result<Encoded, String> {
    if !matches!(size, 1 | 2 | 4 | 8) {
        return Err(format!("is an integer, the kernel's parameter has {size} bytes"));
    }
    let bits = size * 8;
    if bits < 64 && !(-(1i64 << (bits - 1))..1i64 << bits).contains(&value) {
        return Err(format!("is {value}, which does not fit into the {size} bytes of the kernel's parameter"));
    }
    Ok(Encoded::Bytes(value.to_le_bytes().into_iter().take(size as usize).collect()))
}

/// IEEE 754 binary16, ties to even.
fn half(value: f64) -> u16 {
    let bits = value.to_bits();
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    if value.is_nan() {
        return sign | 0x7e00;
    }
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    // The step between halves at this magnitude: 2^(e - 10), at least 2^-24.
    let exponent = (i32::try_from((bits >> 52) & 0x7ff).unwrap_or(0) - 1023).max(-14);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2048 steps")]
    let steps = (magnitude / 2f64.powi(exponent - 10)).round_ties_even() as u16;
    // 1024 steps make the implicit bit, so a carry moves into the exponent by itself.
    let base = u16::try_from(exponent + 14).unwrap_or(0) << 10;
    sign | (base + steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_the_width_of_the_parameter_or_are_refused() {
        let bytes = |value, size| match encode(&[Arg::Int(value)], &[size]) {
            Ok(list) => match &list[..] {
                [Encoded::Bytes(bytes)] => Some(bytes.clone()),
                _ => None,
            },
            Err(_) => None,
        };
        assert_eq!(bytes(-1, 4), Some(vec![255; 4]));
        assert_eq!(bytes(200, 1), Some(vec![200]));
        assert_eq!(bytes(4_294_967_295, 4), Some(vec![255; 4]));
        assert_eq!(bytes(i64::MIN, 8), Some(i64::MIN.to_le_bytes().to_vec()));
        for (value, size) in [(256, 1), (-129, 1), (1 << 32, 4), (-(1 << 31) - 1, 4), (1, 3), (1, 16)] {
            assert_eq!(bytes(value, size), None, "{value} in {size} bytes");
        }
    }

    #[test]
    fn other_arguments_have_their_own_width_only() {
        let fits = |arg: Arg, size| encode(&[arg], &[size]).is_ok();
        for (arg, own) in [
            (Arg::Pointer { buffer: 0, offset: 0 }, 8),
            (Arg::Null, 8),
            (Arg::F16(1.0), 2),
            (Arg::F32(1.0), 4),
            (Arg::F64(1.0), 8),
            (Arg::I32(1), 4),
            (Arg::I64(1), 8),
            (Arg::U32(1), 4),
            (Arg::U8(1), 1),
        ] {
            for size in [1, 2, 4, 8] {
                assert_eq!(fits(arg.clone(), size), size == own, "{arg:?} in {size} bytes");
            }
        }
        assert!(fits(Arg::Float(1.0), 4) && fits(Arg::Float(1.0), 8) && !fits(Arg::Float(1.0), 2));
        assert!(encode(&[], &[8]).is_err_and(|e| e.contains("takes 1")));
    }

    /// A half as a number: the inverse that rounding is checked by.
    fn number(half: u16) -> f64 {
        let (exponent, mantissa) = (i32::from(half >> 10 & 31), f64::from(half & 1023));
        if exponent == 0 { mantissa * 2f64.powi(-24) } else { (1024.0 + mantissa) * 2f64.powi(exponent - 25) }
    }

    #[test]
    fn halves_round_to_the_nearest_with_ties_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (number(bits), number(bits + 1));
            let middle = f64::midpoint(low, high);
            assert_eq!(half(low), bits);
            assert_eq!(half(-low), bits | 0x8000);
            assert_eq!(half(middle), bits + (bits & 1), "the tie above {low}");
            assert_eq!(half(middle.next_down()), bits);
            assert_eq!(half(middle.next_up()), bits + 1);
        }
        assert_eq!((half(65_519.9), half(65_520.0), half(f64::INFINITY)), (0x7bff, 0x7c00, 0x7c00));
        assert_eq!(half(f64::NAN) & 0x7e00, 0x7e00);
    }
}
