//! Device memory that crosses processes: allocations of the driver's virtual memory interface.
//!
//! Each buffer is its own allocation, a multiple of the granularity (2 MiB), so that an exported one shows
//! nothing of its neighbours. Knows handles, addresses and access; must not know what lies in them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::super::Fault;
use super::driver::{check, size};

const POSIX: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn property(device: sys::CUdevice, exported: bool) -> sys::CUmemAllocationProp {
    // SAFETY: a plain structure for which zero is the documented default of every field (the enumerations
    // among them have a member 0).
    let mut property: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = location(device);
    if exported {
        property.requestedHandleTypes = POSIX;
    }
    property
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    // SAFETY: as in `property`.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    location
}

/// Smallest step of an allocation's size on `device`.
///
/// # Errors
/// The driver's.
pub fn granularity(device: sys::CUdevice) -> Result<u64, Fault> {
    let property = property(device, true);
    let mut step = 0usize;
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: `step` is valid for a write, `property` for a read.
    let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut step, &raw const property, option) };
    check(result, "asking for the size of an allocation")?;
    // The contract says 2 MiB; a driver that allows less must not put two exported buffers into one page.
    Ok((step as u64).max(2 << 20))
}

/// `bytes` rounded up, at least one step.
#[must_use]
pub fn rounded(bytes: u64, step: u64) -> u64 {
    bytes.max(1).div_ceil(step).saturating_mul(step)
}

/// Physical memory, made here or imported.
#[derive(Debug)]
pub struct Physical {
    handle: sys::CUmemGenericAllocationHandle,
    pub size: u64,
}

impl Physical {
    /// Allocates `bytes` rounded up.
    ///
    /// # Errors
    /// `memory` where the card has no room.
    pub fn create(device: sys::CUdevice, bytes: u64, step: u64, exported: bool) -> Result<Self, Fault> {
        let rounded = rounded(bytes, step);
        let property = property(device, exported);
        let mut handle = 0;
        // SAFETY: `handle` is valid for a write, `property` for a read.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, size(rounded)?, &raw const property, 0) };
        check(result, &format!("allocating {rounded} bytes"))?;
        Ok(Self { handle, size: rounded })
    }

    /// Imports what another process has exported as `fd`; at least `bytes`, rounded as that process did.
    ///
    /// # Errors
    /// The driver's.
    pub fn import(fd: &OwnedFd, bytes: u64, step: u64) -> Result<Self, Fault> {
        let mut handle = 0;
        let raw = usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX) as *mut std::ffi::c_void;
        // SAFETY: for this handle type the pointer argument carries the descriptor's number itself. The
        // driver keeps its own reference, so `fd` may be closed afterwards.
        let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, raw, POSIX) };
        check(result, "importing a shared buffer")?;
        Ok(Self { handle, size: rounded(bytes, step) })
    }

    /// A descriptor by which another process can import it.
    ///
    /// # Errors
    /// The driver's, for memory that was not made to be exported.
    pub fn export(&self) -> Result<OwnedFd, Fault> {
        let mut fd: std::ffi::c_int = -1;
        // SAFETY: for this handle type the driver writes an `int`.
        let result = unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, POSIX, 0) };
        check(result, "exporting a buffer")?;
        if fd < 0 {
            return Err(Fault::new("cuda", "exporting a buffer gave no descriptor"));
        }
        // SAFETY: the driver has just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: released once; mappings keep the memory alive until they are undone.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

/// A reserved range of addresses, to which one allocation at a time is mapped.
#[derive(Debug)]
pub struct Range {
    pub address: u64,
    size: u64,
    mapped: u64,
    device: sys::CUdevice,
}

impl Range {
    /// Reserves `size` bytes (a multiple of the granularity).
    ///
    /// # Errors
    /// The driver's.
    pub fn reserve(device: sys::CUdevice, bytes: u64) -> Result<Self, Fault> {
        let mut address = 0;
        // SAFETY: `address` is valid for a write; alignment 0 is the default, no fixed address is asked for.
        check(unsafe { sys::cuMemAddressReserve(&raw mut address, size(bytes)?, 0, 0, 0) }, "reserving addresses")?;
        Ok(Self { address, size: bytes, mapped: 0, device })
    }

    /// Maps `memory` instead of what was mapped before. Nothing may run on the device meanwhile.
    ///
    /// # Errors
    /// The driver's, or `memory` larger than the range.
    pub fn map(&mut self, memory: &Physical, write: bool) -> Result<(), Fault> {
        if memory.size > self.size {
            return Err(Fault::new("memory", format!("{} bytes don't fit into {}", memory.size, self.size)));
        }
        self.unmap()?;
        // SAFETY: the range is reserved and unmapped, the handle valid; offset 0 is the only one allowed.
        check(unsafe { sys::cuMemMap(self.address, size(memory.size)?, 0, memory.handle, 0) }, "mapping a buffer")?;
        self.mapped = memory.size;
        let mut access = sys::CUmemAccessDesc {
            location: location(self.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        };
        if !write {
            // SAFETY: exactly the mapping made above; `access` is valid for one read.
            let result = unsafe { sys::cuMemSetAccess(self.address, size(self.mapped)?, &raw const access, 1) };
            if check(result, "").is_ok() {
                return Ok(());
            }
            // Not every driver knows read-only mappings of device memory. Then a write to a parameter is
            // found by the comparison of the state instead.
        }
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: as above.
        let result = unsafe { sys::cuMemSetAccess(self.address, size(self.mapped)?, &raw const access, 1) };
        check(result, "opening a buffer to the device")
    }

    fn unmap(&mut self) -> Result<(), Fault> {
        if self.mapped > 0 {
            // SAFETY: exactly the mapping made by `map`.
            check(unsafe { sys::cuMemUnmap(self.address, size(self.mapped)?) }, "unmapping a buffer")?;
            self.mapped = 0;
        }
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.unmap().is_ok()
            && let Ok(bytes) = size(self.size)
        {
            // SAFETY: reserved by `reserve`, nothing is mapped any more, freed once.
            let _ = unsafe { sys::cuMemAddressFree(self.address, bytes) };
        }
    }
}

/// Memory with an address for good.
#[derive(Debug)]
pub struct Allocation {
    range: Range,
    pub memory: Physical,
}

impl Allocation {
    /// Maps `memory` to new addresses.
    ///
    /// # Errors
    /// The driver's.
    pub fn of(device: sys::CUdevice, memory: Physical, write: bool) -> Result<Self, Fault> {
        let mut range = Range::reserve(device, memory.size)?;
        range.map(&memory, write)?;
        Ok(Self { range, memory })
    }

    #[must_use]
    pub fn address(&self) -> u64 {
        self.range.address
    }
}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn sizes_are_whole_steps_and_never_zero() {
        const MIB: u64 = 1 << 20;
        assert_eq!(rounded(0, 2 * MIB), 2 * MIB);
        assert_eq!(rounded(1, 2 * MIB), 2 * MIB);
        assert_eq!(rounded(2 * MIB, 2 * MIB), 2 * MIB);
        assert_eq!(rounded(2 * MIB + 1, 2 * MIB), 4 * MIB);
    }
}
