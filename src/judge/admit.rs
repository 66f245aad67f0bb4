//! The strict reader of device images: what the driver gets to see, and what a kernel takes.
//!
//! Knows the ELF files that nvcc 13 makes for one architecture, and refuses everything else: a vendor's own tools crash on
//! mutated images, and the driver parses them in the process of the runner. The image is hostile, for so is the input of
//! the compiler that made it: every offset is checked, nothing is allocated by a number of the file. It must not
//! know a plan's buffers or the card at hand.
//!
//! ```text
//! ELF header | .shstrtab .strtab .symtab .debug_frame notes .nv.info* .nv.compat .nv.callgraph .rela.*
//!            | .nv.constant3 .nv.constant4 .nv.constant2.K | .text.K | .nv.global.init | (.nv.shared.K .nv.global)
//!            | .nv.constant0.K | section table | program table
//! ```
//! Parts follow one another with zeros between them, and nothing follows the last.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::plan::{Encoded, Launch, encode};

/// Largest image, bytes.
const IMAGE: usize = 16 << 20;
const SECTIONS: usize = 8192;
const SYMBOLS: usize = 65_536;
/// Longest name that is read, bytes.
const NAME: usize = 4096;
/// Static memory of an image on the card (`__device__` arrays), bytes.
const GLOBAL: u64 = 256 << 20;
/// Local memory of one thread, bytes: with 2,048 threads on each of 132 multiprocessors this is 4.3 GB.
const LOCAL: u32 = 16 << 10;
/// Shared memory of one block, bytes, on compute capability 9.0.
const SHARED: u64 = 227 << 10;
/// What the driver keeps of it for itself; counted in the size of `.nv.shared.*`.
const SHARED_RESERVED: u64 = 1 << 10;
/// Registers of one multiprocessor; a block must fit.
const REGISTERS: u64 = 65_536;
/// Parameters of one kernel, bytes.
const PARAMETERS: u64 = 4096;
/// Where parameters begin in constant bank 0.
const BANK: u64 = 0x210;

/// An admitted image: its kernels by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    pub kernels: BTreeMap<String, Kernel>,
}

/// What a kernel takes and needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    pub name: String,
    /// In the order of the source.
    pub params: Vec<Param>,
    pub param_bytes: u32,
    /// Of one thread.
    pub registers: u32,
    /// Of one block, bytes, without the driver's own.
    pub shared_static: u64,
    /// Of one thread, bytes.
    pub local_bytes: u32,
    /// From `__launch_bounds__`: the most threads of a block.
    pub max_threads: Option<u64>,
    /// From `.reqntid`: the only block that it runs with.
    pub required_block: Option<[u32; 3]>,
    /// From `__cluster_dims__`.
    pub cluster: Option<[u32; 3]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    pub ordinal: u32,
    pub offset: u32,
    pub size: u32,
}

/// Why an image or a launch is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: Code,
    pub message: String,
}

/// What kind of reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Not an ELF file as nvcc makes it, or cut.
    Malformed,
    /// Of another architecture.
    Arch,
    /// Not executable: relocatable, or a container.
    Kind,
    /// Carries PTX, which the driver would compile.
    Ptx,
    /// A section that an image of one file's kernels has no use for.
    Section,
    /// Needs something outside: `printf`, `malloc`, `assert`, launches from the device.
    Symbol,
    /// Over a cap.
    Limit,
    /// A launch names no kernel of the image, or its arguments don't fit.
    Launch,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

type Checked<T = ()> = Result<T, Refusal>;

fn refuse<T>(code: Code, message: impl Into<String>) -> Checked<T> {
    Err(Refusal { code, message: message.into() })
}

fn malformed<T>(what: impl fmt::Display) -> Checked<T> {
    refuse(Code::Malformed, format!("the device image is malformed: {what}"))
}

// ---- reading ----

/// A part of the file; reads beyond its end are refusals.
#[derive(Clone, Copy)]
struct Part<'a>(&'a [u8]);

impl<'a> Part<'a> {
    fn bytes<const N: usize>(self, offset: usize) -> Checked<[u8; N]> {
        let found = offset.checked_add(N).and_then(|end| self.0.get(offset..end)).and_then(|b| b.try_into().ok());
        found.map_or_else(|| malformed("it ends within a field"), Ok)
    }

    fn u8(self, offset: usize) -> Checked<u8> {
        Ok(self.bytes::<1>(offset)?[0])
    }

    fn u16(self, offset: usize) -> Checked<u16> {
        self.bytes(offset).map(u16::from_le_bytes)
    }

    fn u32(self, offset: usize) -> Checked<u32> {
        self.bytes(offset).map(u32::from_le_bytes)
    }

    fn u64(self, offset: usize) -> Checked<u64> {
        self.bytes(offset).map(u64::from_le_bytes)
    }

    fn part(self, offset: u64, size: u64) -> Checked<Part<'a>> {
        let range = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
        let found = range.and_then(|(start, size)| self.0.get(start..start.checked_add(size)?));
        found.map_or_else(|| malformed("a part lies outside the file"), |bytes| Ok(Part(bytes)))
    }

    /// The text from `offset` to the next zero.
    fn text(self, offset: u32) -> Checked<&'a str> {
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let rest = &rest[..rest.len().min(NAME)];
        let end = rest.iter().position(|b| *b == 0);
        let text = end.and_then(|end| std::str::from_utf8(&rest[..end]).ok());
        match text.filter(|t| t.bytes().all(|b| (0x20..0x7f).contains(&b))) {
            Some(text) => Ok(text),
            None => malformed("a name is no text"),
        }
    }
}

/// Types of sections.
mod kind {
    pub const NULL: u32 = 0;
    pub const PROGBITS: u32 = 1;
    pub const SYMTAB: u32 = 2;
    pub const STRTAB: u32 = 3;
    pub const RELA: u32 = 4;
    pub const NOTE: u32 = 7;
    pub const NOBITS: u32 = 8;
    pub const INFO: u32 = 0x7000_0000;
    pub const CALLGRAPH: u32 = 0x7000_0001;
    pub const COMPAT: u32 = 0x7000_0086;
}

/// Flags of sections: writable, allocated, executable, `sh_info` is a section.
const W: u64 = 1;
const A: u64 = 2;
const X: u64 = 4;
const I: u64 = 0x40;

/// Sections that occur once: name, type, flags.
const ONCE: &[(&str, u32, u64)] = &[
    (".shstrtab", kind::STRTAB, 0),
    (".strtab", kind::STRTAB, 0),
    (".symtab", kind::SYMTAB, 0),
    (".debug_frame", kind::PROGBITS, 0),
    (".note.nv.tkinfo", kind::NOTE, 0x0200_0000),
    (".note.nv.cuinfo", kind::NOTE, 0x0100_0040),
    (".nv.info", kind::INFO, 0),
    (".nv.compat", kind::COMPAT, 0),
    (".nv.callgraph", kind::CALLGRAPH, 0),
    (".nv.constant3", kind::PROGBITS, A),
    (".nv.constant4", kind::PROGBITS, A),
    (".nv.global", kind::NOBITS, W | A),
    (".nv.global.init", kind::PROGBITS, W | A),
    (".nv.shared.reserved.0", kind::NOBITS, W | A),
];

/// Sections that each kernel may have: name in front of the kernel's, type, flags.
const EACH: &[(&str, u32, u64)] = &[
    (".text.", kind::PROGBITS, A | X),
    (".nv.info.", kind::INFO, I),
    (".nv.shared.", kind::NOBITS, W | A | I),
    (".nv.constant0.", kind::PROGBITS, A | I),
    (".nv.constant2.", kind::PROGBITS, A | I),
];

/// What may be relocated.
const RELOCATED: &[&str] = &[
    ".text.",
    ".nv.constant0.",
    ".nv.constant2.",
    ".nv.constant3",
    ".nv.constant4",
    ".nv.global.init",
    ".debug_frame",
];

#[derive(Clone, Copy)]
struct Section<'a> {
    name: &'a str,
    kind: u32,
    flags: u64,
    offset: u64,
    size: u64,
    link: u32,
    info: u32,
    align: u64,
    entry: u64,
}

impl Section<'_> {
    fn in_file(&self) -> u64 {
        if self.kind == kind::NOBITS || self.kind == kind::NULL { 0 } else { self.size }
    }
}

#[derive(Clone, Copy)]
struct Symbol<'a> {
    name: &'a str,
    /// Binding and type.
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

impl Symbol<'_> {
    /// A kernel is a global function that is marked as an entry.
    fn is_kernel(&self) -> bool {
        self.info == (GLOBAL_BINDING << 4 | FUNC) && self.other & ENTRY != 0
    }
}

const GLOBAL_BINDING: u8 = 1;
const WEAK: u8 = 2;
const OBJECT: u8 = 1;
const FUNC: u8 = 2;
const SECTION: u8 = 3;
const ENTRY: u8 = 0x10;

/// A file whose tables have been read and whose layout holds.
struct File<'a> {
    whole: Part<'a>,
    sections: Vec<Section<'a>>,
    by_name: HashMap<&'a str, usize>,
    symbols: Vec<Symbol<'a>>,
    /// Index of `.symtab` among the sections.
    symtab: u32,
}

/// Reads an image for `arch` (`sm_90` or `sm_90a` alike: the marks are the same).
///
/// # Errors
/// The first reason to refuse it.
pub fn admit(image: &[u8], arch: &str) -> Result<Image, Refusal> {
    if image.len() > IMAGE {
        return refuse(Code::Limit, format!("the device image has {} bytes, at most {IMAGE} are allowed", image.len()));
    }
    let header = Header::read(Part(image), arch)?;
    let file = File::read(Part(image), &header)?;
    file.check_layout(&header)?;
    file.check_symbols()?;
    file.check_relocations()?;
    file.kernels()
}

// ---- header ----

struct Header {
    sections: u64,
    section_count: u16,
    names: u16,
    programs: u64,
    program_count: u16,
}

impl Header {
    fn read(file: Part<'_>, arch: &str) -> Checked<Self> {
        if file.0.starts_with(&[0x50, 0xed, 0x55, 0xba]) {
            return refuse(Code::Kind, "the device image is a fat binary, which may carry PTX; a cubin is expected");
        }
        // 64 bits, little endian, CUDA's ABI as of nvcc 13.
        if file.bytes::<16>(0)? != *b"\x7fELF\x02\x01\x01\x41\x08\0\0\0\0\0\0\0" {
            return refuse(Code::Malformed, "the device image is not an ELF file as nvcc 13 makes it");
        }
        match (file.u16(16)?, file.u16(18)?) {
            (2, 190) => {}
            (1, 190) => {
                return refuse(
                    Code::Kind,
                    "the device image is relocatable; it must be executable (don't use -rdc or -dc)",
                );
            }
            (_, 190) => return refuse(Code::Kind, "the device image is not executable"),
            _ => return malformed("it is not for a CUDA device"),
        }
        let digits: String =
            arch.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
        let flags = file.u32(48)?;
        let found = flags >> 8 & 0xff;
        if digits.parse() != Ok(found) {
            let message = format!("the device image is for sm_{found}, the card is {arch}: build it for the card");
            return refuse(Code::Arch, message);
        }
        // 9 and 14 in front instead of 6: with line information, for the debugger. Their sections say so better.
        if !matches!(flags & 0xffff_00ff, 0x0600_0004 | 0x0900_0004 | 0x0e00_0004)
            || file.u32(20)? != 1
            || file.u64(24)? != 0
            || [file.u16(52)?, file.u16(54)?, file.u16(58)?] != [64, 56, 64]
        {
            return malformed("its header has a field that nvcc 13 doesn't write");
        }
        Ok(Self {
            sections: file.u64(40)?,
            section_count: file.u16(60)?,
            names: file.u16(62)?,
            programs: file.u64(32)?,
            program_count: file.u16(56)?,
        })
    }
}

// ---- tables ----

impl<'a> File<'a> {
    fn read(whole: Part<'a>, header: &Header) -> Checked<Self> {
        let count = usize::from(header.section_count);
        if count == 0 || count > SECTIONS || !header.sections.is_multiple_of(8) {
            return malformed(format!("{count} sections"));
        }
        let table = whole.part(header.sections, count as u64 * 64)?;
        let raw = |index: usize| -> Checked<Section<'a>> {
            let at = index * 64;
            if table.u64(at + 16)? != 0 {
                return malformed(format!("section {index} has an address"));
            }
            Ok(Section {
                name: "",
                kind: table.u32(at + 4)?,
                flags: table.u64(at + 8)?,
                offset: table.u64(at + 24)?,
                size: table.u64(at + 32)?,
                link: table.u32(at + 40)?,
                info: table.u32(at + 44)?,
                align: table.u64(at + 48)?,
                entry: table.u64(at + 56)?,
            })
        };
        let names = raw(usize::from(header.names).min(count - 1))?;
        if names.kind != kind::STRTAB {
            return malformed("the names of its sections are no string table");
        }
        let names = whole.part(names.offset, names.size)?;
        let mut sections = Vec::with_capacity(count);
        let mut by_name = HashMap::new();
        for index in 0..count {
            let section = Section { name: names.text(table.u32(index * 64)?)?, ..raw(index)? };
            check_section(index, &section, whole)?;
            if index > 0 && by_name.insert(section.name, index).is_some() {
                return malformed(format!("two sections are called {}", section.name));
            }
            sections.push(section);
        }
        let mut file = Self { whole, sections, by_name, symbols: Vec::new(), symtab: 0 };
        if file.by_name.get(".shstrtab") != Some(&usize::from(header.names)) {
            return malformed("the names of its sections are not in .shstrtab");
        }
        file.read_symbols()?;
        file.check_links()?;
        Ok(file)
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.by_name.get(name).and_then(|index| self.sections.get(*index))
    }

    fn content(&self, section: &Section<'a>) -> Checked<Part<'a>> {
        self.whole.part(section.offset, section.in_file())
    }

    fn read_symbols(&mut self) -> Checked {
        let (Some(index), Some(strings)) = (self.by_name.get(".symtab").copied(), self.by_name.get(".strtab")) else {
            return malformed("it has no symbols");
        };
        let table = self.sections[index];
        self.symtab = u32::try_from(index).unwrap_or(u32::MAX);
        if table.entry != 24
            || !table.size.is_multiple_of(24)
            || table.size / 24 > SYMBOLS as u64
            || table.link as usize != *strings
        {
            return malformed("its table of symbols has a wrong size or no names");
        }
        let names = self.content(&self.sections[*strings])?;
        let part = self.content(&table)?;
        for at in (0..part.0.len()).step_by(24) {
            self.symbols.push(Symbol {
                name: names.text(part.u32(at)?)?,
                info: part.u8(at + 4)?,
                other: part.u8(at + 5)?,
                section: part.u16(at + 6)?,
                value: part.u64(at + 8)?,
                size: part.u64(at + 16)?,
            });
        }
        Ok(())
    }

    /// What `sh_link` and `sh_info` point to.
    fn check_links(&self) -> Checked {
        for section in self.sections.iter().skip(1) {
            let wrong = || malformed(format!("section {} refers to a wrong one", section.name));
            let target = self.sections.get(section.info as usize);
            let links_symbols = section.link == self.symtab;
            let right = match section.kind {
                kind::RELA => {
                    links_symbols
                        && section.entry == 24
                        && section.size % 24 == 0
                        && target.is_some_and(|t| section.name.strip_prefix(".rela") == Some(t.name))
                }
                kind::INFO if section.name == ".nv.info" => links_symbols && section.info == 0,
                kind::INFO => links_symbols && is_text_of(target, section.name, ".nv.info."),
                kind::CALLGRAPH => links_symbols && section.info == 0 && section.entry == 8 && section.size % 8 == 0,
                kind::SYMTAB => {
                    // The first that is not local; local ones may follow it.
                    let local = |s: &Symbol<'_>| s.info >> 4 == 0;
                    section.info as usize <= self.symbols.len() && self.symbols.first().is_none_or(local)
                }
                kind::NOTE => section.entry == 0,
                kind::PROGBITS if section.flags & X != 0 => {
                    // The symbol of the function that it holds.
                    let name = section.name.strip_prefix(".text.");
                    let symbol = self.symbols.get(section.info as usize & 0xff_ffff);
                    links_symbols && section.info <= 0xff_ffff && symbol.map(|s| s.name) == name
                }
                kind::PROGBITS | kind::NOBITS if section.flags & I != 0 => {
                    let prefix = EACH.iter().map(|e| e.0).find(|p| section.name.starts_with(p)).unwrap_or("?");
                    section.link == 0 && is_text_of(target, section.name, prefix)
                }
                _ => section.link == 0 && section.info == 0 && section.entry == 0,
            };
            if !right {
                return wrong();
            }
        }
        Ok(())
    }
}

fn is_text_of(target: Option<&Section<'_>>, name: &str, prefix: &str) -> bool {
    target.is_some_and(|t| t.name.strip_prefix(".text.").is_some_and(|k| Some(k) == name.strip_prefix(prefix)))
}

fn check_section(index: usize, section: &Section<'_>, whole: Part<'_>) -> Checked {
    let name = section.name;
    if index == 0 {
        let zero = section.kind == kind::NULL && name.is_empty() && section.size == 0 && section.flags == 0;
        return if zero { Ok(()) } else { malformed("its first section is not empty") };
    }
    if name.contains("ptx") && name.starts_with(".nv_debug")
        || name.starts_with(".nvFatBin")
        || name.contains("nv_fatbin")
    {
        let message = format!("the device image carries PTX ({name}); build without -lineinfo and -G");
        return refuse(Code::Ptx, message);
    }
    let once = ONCE.iter().find(|s| s.0 == name);
    let each = || EACH.iter().find(|s| name.len() > s.0.len() && name.starts_with(s.0));
    let known = match once.or_else(each) {
        Some((_, kind, flags)) => section.kind == *kind && section.flags == *flags,
        None => {
            let moved = name.strip_prefix(".rela");
            if !moved.is_some_and(|target| RELOCATED.iter().any(|r| target.starts_with(r))) {
                return refuse(Code::Section, format!("the device image has a section {name:?}, which is not allowed"));
            }
            section.kind == kind::RELA && section.flags == I
        }
    };
    if !known {
        return refuse(Code::Section, format!("section {name} of the device image has a wrong type or wrong flags"));
    }
    if !section.align.is_power_of_two() || section.align > 4096 || !section.offset.is_multiple_of(section.align) {
        return malformed(format!("section {name} is not aligned"));
    }
    let end = section.offset.checked_add(section.in_file());
    if end.is_none_or(|end| end > whole.0.len() as u64) {
        return malformed(format!("section {name} lies outside the file"));
    }
    if section.kind == kind::NOBITS && section.size > GLOBAL {
        let message = format!("{} bytes of __device__ memory, at most {GLOBAL} are allowed", section.size);
        return refuse(Code::Limit, message);
    }
    Ok(())
}

// ---- layout ----

impl File<'_> {
    /// Every byte of the file belongs to one part, or is zero between two.
    fn check_layout(&self, header: &Header) -> Checked {
        let tables = [
            (header.sections, u64::from(header.section_count) * 64),
            (header.programs, u64::from(header.program_count) * 56),
        ];
        let mut parts: Vec<(u64, u64)> = self.sections.iter().map(|s| (s.offset, s.in_file())).collect();
        parts.extend([(0, 64)].into_iter().chain(tables));
        parts.retain(|(_, size)| *size > 0);
        parts.sort_unstable();
        let mut end = 0u64;
        for (offset, size) in parts {
            if offset < end {
                return malformed("two of its parts overlap");
            }
            if self.whole.part(end, offset - end)?.0.iter().any(|b| *b != 0) {
                return malformed("there is data between its parts");
            }
            end = offset.saturating_add(size);
        }
        if end != self.whole.0.len() as u64 {
            return malformed("it does not end with its last part");
        }
        self.check_programs(header)
    }

    /// Segments lie in the file; each that is loaded holds whole sections of its own rights.
    fn check_programs(&self, header: &Header) -> Checked {
        let count = usize::from(header.program_count);
        let table = self.whole.part(header.programs, count as u64 * 56)?;
        for at in (0..count).map(|i| i * 56) {
            let (kind, flags) = (table.u32(at)?, table.u32(at + 4)?);
            let (offset, address, physical) = (table.u64(at + 8)?, table.u64(at + 16)?, table.u64(at + 24)?);
            let (size, memory) = (table.u64(at + 32)?, table.u64(at + 40)?);
            let end = offset.checked_add(size).filter(|end| *end <= self.whole.0.len() as u64);
            let aligned = table.u64(at + 48)? == 8;
            let Some(end) = end.filter(|_| memory >= size && address == 0 && physical == 0 && aligned) else {
                return malformed("a segment lies outside the file");
            };
            let itself = offset == header.programs && size == count as u64 * 56;
            match (kind, flags) {
                (6, 4) if itself => continue,
                (1, 4) if itself && memory == size => continue,
                (1, 4..=6) if memory == size || flags == 6 => {}
                _ => return malformed("it has a segment of a kind that nvcc 13 doesn't make"),
            }
            let rights = match flags {
                4 => A,
                5 => A | X,
                _ => A | W,
            };
            let mut room = 0u64;
            for section in self.sections.iter().filter(|s| s.in_file() > 0) {
                let (start, stop) = (section.offset, section.offset.saturating_add(section.in_file()));
                let inside = offset <= start && stop <= end;
                let apart = stop <= offset || end <= start;
                if !inside && !apart || inside && section.flags & (A | X | W) != rights {
                    return malformed(format!("a segment covers section {} with other rights", section.name));
                }
            }
            for section in self.sections.iter().filter(|s| s.kind == kind::NOBITS) {
                room = room.saturating_add(section.size).saturating_add(section.align);
            }
            if memory - size > room {
                return malformed("a segment is larger than its sections");
            }
        }
        Ok(())
    }
}

// ---- symbols and relocations ----

impl File<'_> {
    fn check_symbols(&self) -> Checked {
        for (index, symbol) in self.symbols.iter().enumerate() {
            let name = symbol.name;
            let kind = symbol.info & 15;
            if symbol.section == 0 {
                // The first, and place holders of no name and no kind that relocations of nothing refer to.
                let nameless = name.is_empty() && symbol.info == 0 && symbol.value == 0 && symbol.size == 0;
                let reserved = name == ".nv.reservedSmem.offset0"
                    && (symbol.info, symbol.other, symbol.value, symbol.size) == (WEAK << 4 | OBJECT, 0, 0, 4);
                if !nameless && !reserved {
                    return refuse(Code::Symbol, undefined(name));
                }
                continue;
            }
            if index == 0 || symbol.info >> 4 > WEAK {
                return malformed(format!("symbol {name:?} has an unknown binding"));
            }
            let Some(section) = self.sections.get(usize::from(symbol.section)) else {
                return malformed(format!("symbol {name:?} is in no section"));
            };
            if symbol.value.checked_add(symbol.size).is_none_or(|end| end > section.size) {
                return malformed(format!("symbol {name:?} lies outside of {}", section.name));
            }
            let entry = symbol.other & ENTRY != 0;
            match kind {
                // Managed memory is marked so: it needs the runtime on the host.
                OBJECT if symbol.other & 4 != 0 => {
                    return refuse(Code::Symbol, format!("{name} is __managed__, which a plan has no host for"));
                }
                OBJECT if symbol.other != 0 || !section.name.starts_with(".nv.") => {
                    return malformed(format!("the object {name:?} is in {}", section.name));
                }
                FUNC if section.flags & X == 0 || symbol.other & !ENTRY != 0 || entry != symbol.is_kernel() => {
                    return malformed(format!("the function {name:?} is in {}", section.name));
                }
                SECTION if symbol.value != 0 || symbol.size != 0 || symbol.other != 0 || name != section.name => {
                    return malformed(format!("the symbol of section {} has a value", section.name));
                }
                0 if name != "__nv_reservedSMEM_offset_0_alias" || section.name != ".nv.shared.reserved.0" => {
                    return malformed(format!("symbol {name:?} has no type"));
                }
                0 | OBJECT | FUNC | SECTION => {}
                other => return malformed(format!("symbol {name:?} is of the unknown type {other}")),
            }
        }
        Ok(())
    }

    fn check_relocations(&self) -> Checked {
        for section in self.sections.iter().filter(|s| s.kind == kind::RELA) {
            let Some(target) = self.sections.get(section.info as usize) else {
                return malformed(format!("{} has no target", section.name));
            };
            // An instruction has 16 bytes, a pointer 8; in frames of the debugger addresses have 8.
            let width = 8;
            let part = self.content(section)?;
            for at in (0..part.0.len()).step_by(24) {
                let (offset, info, addend) = (part.u64(at)?, part.u64(at + 8)?, part.u64(at + 16)?);
                if offset.checked_add(width).is_none_or(|end| end > target.size) {
                    return malformed(format!("{} changes bytes outside of {}", section.name, target.name));
                }
                let symbol = usize::try_from(info >> 32).ok().and_then(|i| self.symbols.get(i));
                if symbol.is_none() || info & 0xffff_ffff > 255 {
                    return malformed(format!("{} has an unknown symbol or kind", section.name));
                }
                if i32::try_from(addend.cast_signed()).is_err() {
                    return malformed(format!("{} reaches too far", section.name));
                }
            }
        }
        Ok(())
    }
}

/// What an undefined symbol means to the author of a kernel.
fn undefined(name: &str) -> String {
    let short: String = name.chars().take(120).collect();
    let what = match name {
        "vprintf" => "printf writes to the host".to_owned(),
        "malloc" | "free" => format!("{name} on the device is a heap of the runtime; allocate a workspace instead"),
        "__assertfail" => "assert stops the device; build with NDEBUG or leave it out".to_owned(),
        _ if name.starts_with("cuda") || name.starts_with("__cuda") || name.starts_with("cnp") => {
            format!("{short} calls the runtime from the device; launch from the plan instead")
        }
        _ => format!("{short} is not in the image"),
    };
    format!("the kernel needs something outside of its image: {what}")
}

// ---- attributes and kernels ----

/// Codes of `.nv.info` that are read or harmless; all others are refused, so that a code which asks the driver for
/// something (system calls, device runtime, external functions) needs a decision here.
const ATTRIBUTES: &[(u8, u8)] = &[
    (ANY, 0x01), // PAD
    (ANY, 0x04), // CTAIDZ_USED
    (4, attribute::MAX_THREADS),
    (4, attribute::PARAM_CBANK),
    (4, attribute::REQNTID),
    (4, attribute::FRAME_SIZE),
    (4, attribute::MIN_STACK_SIZE),
    (4, attribute::KPARAM_INFO),
    (3, attribute::CBANK_PARAM_SIZE),
    (3, 0x1b),   // MAXREG_COUNT
    (4, 0x1c),   // EXIT_INSTR_OFFSETS
    (4, 0x1d),   // S2RCTAID_INSTR_OFFSETS
    (4, 0x1e),   // CRS_STACK_SIZE
    (ANY, 0x21), // EXPLICIT_CACHING
    (4, attribute::MAX_STACK_SIZE),
    (4, 0x25),   // LD_CACHEMOD_INSTR_OFFSETS
    (ANY, 0x26), // LOAD_CACHE_REQUEST
    (4, 0x27),   // ATOM_SYS_INSTR_OFFSETS
    (4, 0x28),   // COOP_GROUP_INSTR_OFFSETS
    (4, 0x29),   // COOP_GROUP_MASK_REGIDS
    (ANY, 0x2a), // SW1850030_WAR
    (ANY, 0x2b), // WMMA_USED
    (4, 0x2d),   // ATOMF16_EMUL_INSTR_OFFSETS
    (4, 0x2e),   // ATOM16_EMUL_INSTR_REG_MAP
    (4, attribute::REGCOUNT),
    (4, 0x30),   // SW2393858_WAR
    (4, 0x31),   // INT_WARP_WIDE_INSTR_OFFSETS
    (4, 0x34),   // INDIRECT_BRANCH_TARGETS
    (ANY, 0x35), // SW2861232_WAR
    (4, 0x36),   // SW_WAR
    (4, 0x37),   // CUDA_API_VERSION
    (3, 0x38),   // NUM_MBARRIERS
    (4, 0x39),   // MBARRIER_INSTR_OFFSETS
    (4, attribute::CTA_PER_CLUSTER),
    (1, 0x3e),   // EXPLICIT_CLUSTER
    (4, 0x3f),   // MAX_CLUSTER_RANK
    (ANY, 0x40), // INSTR_REG_MAP
    (ANY, 0x41), // RESERVED_SMEM_USED
    (ANY, 0x42), // RESERVED_SMEM_0_SIZE
    (4, 0x44),   // UNUSED_LOAD_BYTE_OFFSET
    (4, 0x47),   // SW_WAR_MEMBAR_SYS_INSTR_OFFSETS
    (ANY, 0x4a), // VRC_CTA_INIT_COUNT
    (2, 0x4c),   // NUM_BARRIERS
    (3, 0x50),   // SPARSE_MMA_MASK
    (ANY, 0x53), // GEN_ERRBAR_AT_EXIT
    (1, 0x54),   // REG_RECONFIG
    (4, 0x55),   // ANNOTATIONS
    (4, 0x59),   // LOCAL_CTA_ASYNC_STORE_OFFSETS
    (1, 0x5b),   // BLOCKS_ARE_CLUSTERS
    (3, 0x5f),   // MERCURY_ISA_VERSION
];

/// Any form of an attribute whose value nobody reads here.
const ANY: u8 = 0;

mod attribute {
    pub const MAX_THREADS: u8 = 0x05;
    pub const PARAM_CBANK: u8 = 0x0a;
    pub const EXTERNS: u8 = 0x0f;
    pub const REQNTID: u8 = 0x10;
    pub const FRAME_SIZE: u8 = 0x11;
    pub const MIN_STACK_SIZE: u8 = 0x12;
    pub const KPARAM_INFO: u8 = 0x17;
    pub const CBANK_PARAM_SIZE: u8 = 0x19;
    pub const MAX_STACK_SIZE: u8 = 0x23;
    pub const REGCOUNT: u8 = 0x2f;
    pub const CTA_PER_CLUSTER: u8 = 0x3d;
}

/// Calls `each` with code, short value and long value of every attribute.
fn attributes(part: Part<'_>, section: &str, mut each: impl FnMut(u8, u16, Part<'_>) -> Checked) -> Checked {
    let mut at = 0;
    while at < part.0.len() {
        let (format, code, value) = (part.u8(at)?, part.u8(at + 1)?, part.u16(at + 2)?);
        at += 4;
        let long = if format == 4 { part.part(at as u64, u64::from(value))? } else { Part(&[]) };
        at += long.0.len();
        if code == attribute::EXTERNS {
            return refuse(Code::Symbol, "the kernel calls functions outside of its image");
        }
        if !(1..=4).contains(&format) || !ATTRIBUTES.iter().any(|a| a.1 == code && (a.0 == ANY || a.0 == format)) {
            let message = format!(
                "the device image has the attribute {code:#04x} (form {format}) in {section}, which this version does not know"
            );
            return refuse(Code::Section, message);
        }
        each(code, value, long)?;
    }
    Ok(())
}

fn three(part: Part<'_>) -> Checked<[u32; 3]> {
    if part.0.len() != 12 {
        return malformed("an attribute of three numbers has another size");
    }
    Ok([part.u32(0)?, part.u32(4)?, part.u32(8)?])
}

impl File<'_> {
    fn kernels(&self) -> Checked<Image> {
        let mut image = Image::default();
        let mut index_of = HashMap::new();
        for (index, symbol) in self.symbols.iter().enumerate().filter(|(_, s)| s.is_kernel()) {
            let kernel = self.kernel(symbol)?;
            index_of.insert(index, kernel.name.clone());
            if image.kernels.insert(kernel.name.clone(), kernel).is_some() {
                return malformed(format!("two kernels are called {}", symbol.name));
            }
        }
        for section in &self.sections {
            if section.flags & X != 0
                && !section.name.strip_prefix(".text.").is_some_and(|n| image.kernels.contains_key(n))
            {
                return malformed(format!("{} belongs to no kernel", section.name));
            }
        }
        self.read_shared_attributes(&mut image, &index_of)?;
        for kernel in image.kernels.values() {
            check_needs(kernel)?;
        }
        if image.kernels.is_empty() {
            return refuse(Code::Malformed, "the device image has no kernel: mark one `extern \"C\" __global__`");
        }
        Ok(image)
    }

    /// Registers, stack and frames stand in `.nv.info`, by index of the symbol.
    fn read_shared_attributes(&self, image: &mut Image, index_of: &HashMap<usize, String>) -> Checked {
        let Some(section) = self.section(".nv.info") else { return malformed("it has no .nv.info") };
        let mut counted = HashSet::new();
        attributes(self.content(section)?, section.name, |code, _, long| {
            if !matches!(
                code,
                attribute::REGCOUNT | attribute::FRAME_SIZE | attribute::MIN_STACK_SIZE | attribute::MAX_STACK_SIZE
            ) {
                return Ok(());
            }
            if long.0.len() != 8 {
                return malformed("an attribute of a symbol has another size");
            }
            let (index, value) = (long.u32(0)? as usize, long.u32(4)?);
            // Frames are given for functions inside a kernel too; the kernel's stack holds them.
            if self.symbols.get(index).is_none_or(|s| s.info & 15 != FUNC) {
                return malformed("an attribute belongs to no function");
            }
            let Some(kernel) = index_of.get(&index).and_then(|name| image.kernels.get_mut(name)) else { return Ok(()) };
            if code == attribute::REGCOUNT {
                kernel.registers = value;
                counted.insert(index);
            } else {
                kernel.local_bytes = kernel.local_bytes.max(value);
            }
            Ok(())
        })?;
        match index_of.iter().find(|(index, _)| !counted.contains(*index)) {
            Some((_, name)) => malformed(format!("the registers of {name} are not given")),
            None => Ok(()),
        }
    }

    fn kernel(&self, symbol: &Symbol<'_>) -> Checked<Kernel> {
        let name = symbol.name;
        let text = self.sections.get(usize::from(symbol.section));
        let own = text.is_some_and(|t| t.name.strip_prefix(".text.") == Some(name) && t.size == symbol.size);
        if !own || symbol.value != 0 || symbol.size == 0 {
            return malformed(format!("kernel {name} does not fill its section"));
        }
        let sections = (self.section(&format!(".nv.info.{name}")), self.section(&format!(".nv.constant0.{name}")));
        let (Some(info), Some(bank)) = sections else {
            return malformed(format!("kernel {name} has no description of its parameters"));
        };
        let shared = self.section(&format!(".nv.shared.{name}")).map_or(0, |s| s.size);
        let mut kernel = Kernel {
            name: name.to_owned(),
            shared_static: shared.saturating_sub(SHARED_RESERVED),
            ..Kernel::default()
        };
        let (mut bytes, mut place) = (None, None);
        attributes(self.content(info)?, info.name, |code, short, long| {
            match code {
                attribute::KPARAM_INFO => {
                    if long.0.len() != 12 || kernel.params.len() >= PARAMETERS as usize {
                        return malformed("the description of a parameter has another size");
                    }
                    kernel.params.push(Param {
                        ordinal: u32::from(long.u16(4)?),
                        offset: u32::from(long.u16(6)?),
                        size: long.u32(8)? >> 18,
                    });
                }
                attribute::CBANK_PARAM_SIZE => bytes = Some(u64::from(short)),
                attribute::PARAM_CBANK => {
                    if long.0.len() != 8 {
                        return malformed("the place of the parameters has another size");
                    }
                    place = Some((u64::from(long.u16(4)?), u64::from(long.u16(6)?)));
                }
                attribute::MAX_THREADS => {
                    kernel.max_threads =
                        Some(three(long)?.iter().fold(1u64, |all, n| all.saturating_mul(u64::from(*n))));
                }
                attribute::REQNTID => kernel.required_block = Some(three(long)?),
                attribute::CTA_PER_CLUSTER => kernel.cluster = Some(three(long)?),
                _ => {}
            }
            Ok(())
        })?;
        let param_bytes = bytes.unwrap_or(0);
        if place.unwrap_or((BANK, 0)) != (BANK, param_bytes) || bank.size != BANK + param_bytes {
            return malformed(format!("the parameters of kernel {name} have two sizes"));
        }
        kernel.params.sort_unstable_by_key(|p| p.ordinal);
        kernel.param_bytes = u32::try_from(param_bytes).unwrap_or(u32::MAX);
        check_params(&kernel)?;
        Ok(kernel)
    }
}

/// Parameters are counted up, in order, apart, and fill their bytes but for alignment.
fn check_params(kernel: &Kernel) -> Checked {
    let mut end = 0;
    for (ordinal, param) in kernel.params.iter().enumerate() {
        let padding = param.offset.checked_sub(end);
        if param.ordinal as usize != ordinal || param.size == 0 || padding.is_none_or(|p| p >= 128) {
            return malformed(format!("the parameters of kernel {} overlap or are out of order", kernel.name));
        }
        end = param.offset + param.size;
    }
    if end != kernel.param_bytes {
        return malformed(format!("the parameters of kernel {} don't fill their place", kernel.name));
    }
    if u64::from(end) > PARAMETERS {
        let message =
            format!("the parameters of kernel {} have {end} bytes, at most {PARAMETERS} are allowed", kernel.name);
        return refuse(Code::Limit, message);
    }
    Ok(())
}

fn check_needs(kernel: &Kernel) -> Checked {
    let Kernel { name, registers, shared_static, local_bytes, .. } = kernel;
    if *registers == 0 || *registers > 255 {
        return malformed(format!("kernel {name} has {registers} registers"));
    }
    if *local_bytes > LOCAL {
        let message = format!(
            "kernel {name} needs {local_bytes} bytes of local memory a thread (spilled registers, arrays, recursion), at most {LOCAL} are allowed"
        );
        return refuse(Code::Limit, message);
    }
    if *shared_static > SHARED {
        return refuse(Code::Limit, format!("kernel {name} has {shared_static} bytes of static shared memory"));
    }
    Ok(())
}

// ---- launches ----

/// Checks a launch against the kernel that it names and encodes its arguments.
///
/// # Errors
/// What does not fit, in words for the candidate's author.
pub fn check_launch(image: &Image, launch: &Launch) -> Result<Vec<Encoded>, Refusal> {
    let wrong = |message: String| refuse(Code::Launch, message);
    let Some(kernel) = image.kernels.get(&launch.kernel) else {
        let mut known: Vec<&str> = image.kernels.keys().map(String::as_str).take(8).collect();
        if image.kernels.len() > known.len() {
            known.push("..");
        }
        let mangled = image.kernels.keys().any(|k| k.starts_with("_Z") && k.contains(&launch.kernel));
        let hint = if mangled { "; mark it extern \"C\"" } else { "" };
        return wrong(format!("there is no kernel {} in the image, it has {}{hint}", launch.kernel, known.join(", ")));
    };
    let name = &kernel.name;
    let threads = launch.block.iter().fold(1u64, |all, n| all.saturating_mul(u64::from(*n)));
    if let Some(block) = kernel.required_block
        && block != launch.block
    {
        return wrong(format!("kernel {name} runs with blocks of {block:?} only, not {:?}", launch.block));
    }
    if let Some(most) = kernel.max_threads.filter(|most| threads > *most) {
        return wrong(format!("kernel {name} is bound to {most} threads a block (__launch_bounds__), not {threads}"));
    }
    // Registers are given to warps, 8 a thread at a time.
    let taken = u64::from(kernel.registers).next_multiple_of(8) * threads.next_multiple_of(32);
    if taken > REGISTERS {
        return wrong(format!(
            "a block of {threads} threads with {} registers each needs {taken} registers, a multiprocessor has {REGISTERS}: \
             use smaller blocks or __launch_bounds__({threads})",
            kernel.registers
        ));
    }
    let shared = kernel.shared_static.saturating_add(u64::from(launch.shared));
    if shared > SHARED {
        return wrong(format!(
            "a block needs {shared} bytes of shared memory ({} static, {} dynamic), at most {SHARED} are there",
            kernel.shared_static, launch.shared
        ));
    }
    if let Some(cluster) = kernel.cluster {
        if launch.cluster.is_some_and(|asked| asked != cluster) {
            return wrong(format!(
                "kernel {name} has clusters of {cluster:?}, the launch asks for {:?}",
                launch.cluster
            ));
        }
        if (0..3).any(|d| cluster[d] == 0 || !launch.grid[d].is_multiple_of(cluster[d])) {
            return wrong(format!("the grid {:?} is not a multiple of the cluster {cluster:?}", launch.grid));
        }
    }
    let sizes: Vec<u32> = kernel.params.iter().map(|p| p.size).collect();
    encode(&launch.args, &sizes).or_else(|why| wrong(format!("kernel {name}: {why}")))
}

#[cfg(test)]
pub(super) mod tests;
