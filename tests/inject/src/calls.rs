//! Which system calls are of interest, and how they are cut short.

use std::fs;

use nix::errno::Errno;
use nix::libc::{self, c_long, user_regs_struct};
use nix::sys::ptrace;
use nix::unistd::Pid;

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It writes bytes to a file, and can write fewer.
    Writes,
    /// It changes a file or a directory otherwise, or makes a change last.
    Changes,
    /// It tells another process something, which may change files then.
    Tells,
}

/// A call of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

/// The number of the call that a thread is about to make.
fn number(registers: &user_regs_struct) -> c_long {
    registers.orig_rax.cast_signed()
}

/// Says which call a thread is about to make, if it is of interest.
pub(crate) fn about_to_make(thread: Pid, registers: &user_regs_struct) -> Option<Call> {
    let descriptor = || is_file(thread, registers.rdi);
    let creates = |flags: u64| {
        let wanted = (libc::O_CREAT | libc::O_TMPFILE) & !libc::O_DIRECTORY;
        u64::try_from(wanted).is_ok_and(|wanted| flags & wanted != 0)
    };
    let (name, kind, applies) = match number(registers) {
        libc::SYS_write => ("write", Kind::Writes, descriptor()),
        libc::SYS_pwrite64 => ("pwrite64", Kind::Writes, descriptor()),
        libc::SYS_writev => ("writev", Kind::Writes, descriptor()),
        libc::SYS_pwritev => ("pwritev", Kind::Writes, descriptor()),
        libc::SYS_pwritev2 => ("pwritev2", Kind::Changes, descriptor()),
        libc::SYS_copy_file_range => ("copy_file_range", Kind::Changes, true),
        libc::SYS_sendfile => ("sendfile", Kind::Changes, descriptor()),
        libc::SYS_ftruncate => ("ftruncate", Kind::Changes, descriptor()),
        libc::SYS_fallocate => ("fallocate", Kind::Changes, descriptor()),
        libc::SYS_fsync => ("fsync", Kind::Changes, descriptor()),
        libc::SYS_fdatasync => ("fdatasync", Kind::Changes, descriptor()),
        libc::SYS_syncfs => ("syncfs", Kind::Changes, true),
        libc::SYS_sync_file_range => ("sync_file_range", Kind::Changes, descriptor()),
        libc::SYS_fchmod => ("fchmod", Kind::Changes, descriptor()),
        libc::SYS_open => ("open", Kind::Changes, creates(registers.rsi)),
        libc::SYS_openat => ("openat", Kind::Changes, creates(registers.rdx)),
        libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => {
            ("rename", Kind::Changes, true)
        }
        libc::SYS_link | libc::SYS_linkat => ("link", Kind::Changes, true),
        libc::SYS_symlink | libc::SYS_symlinkat => ("symlink", Kind::Changes, true),
        libc::SYS_unlink | libc::SYS_unlinkat => ("unlink", Kind::Changes, true),
        libc::SYS_mkdir | libc::SYS_mkdirat => ("mkdir", Kind::Changes, true),
        libc::SYS_rmdir => ("rmdir", Kind::Changes, true),
        libc::SYS_sendmsg => ("sendmsg", Kind::Tells, true),
        _ => return None,
    };
    applies.then_some(Call { name, kind })
}

/// Whether a descriptor is a file or directory of a file system that others see, and no pipe,
/// event or memory.
fn is_file(thread: Pid, descriptor: u64) -> bool {
    let path = format!("/proc/{thread}/fd/{descriptor}");
    let named =
        fs::read_link(&path).is_ok_and(|name| name.is_absolute() && !name.starts_with("/memfd:"));
    named && fs::metadata(&path).is_ok_and(|meta| meta.is_file() || meta.is_dir())
}

/// A word in the memory of a thread's process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Word {
    address: u64,
    value: c_long,
}

impl Word {
    pub(crate) fn read(thread: Pid, address: u64) -> Result<Self, Errno> {
        let value = ptrace::read(thread, address as ptrace::AddressType)?;
        Ok(Self { address, value })
    }

    pub(crate) fn value(self) -> c_long {
        self.value
    }

    /// The place with another value.
    pub(crate) fn with(self, value: c_long) -> Self {
        Self { value, ..self }
    }

    /// Puts the value in its place.
    pub(crate) fn write(self, thread: Pid) -> Result<(), Errno> {
        ptrace::write(thread, self.address as ptrace::AddressType, self.value)
    }
}

/// Changes a call that writes bytes, before it is made, to the same one that writes half of them;
/// gives what it overwrote in memory. It stays the same call because a filter of the program's may
/// let no other pass.
pub(crate) fn halve(thread: Pid, registers: &mut user_regs_struct) -> Result<Option<Word>, Errno> {
    let mut overwritten = None;
    if matches!(number(registers), libc::SYS_writev | libc::SYS_pwritev) {
        // The first piece only, whose length is behind its address.
        let length = Word::read(thread, registers.rsi + 8)?;
        length.with(half(length.value.cast_unsigned()).cast_signed()).write(thread)?;
        registers.rdx = 1;
        overwritten = Some(length);
    } else {
        registers.rdx = half(registers.rdx);
    }
    ptrace::setregs(thread, *registers)?;
    Ok(overwritten)
}

/// Changes a call, before it is made, to one that does nothing but fail, and that any program may
/// make: closing no descriptor.
pub(crate) fn void(thread: Pid, registers: &mut user_regs_struct) -> Result<(), Errno> {
    registers.orig_rax = libc::SYS_close.cast_unsigned();
    registers.rdi = u64::MAX;
    ptrace::setregs(thread, *registers)
}

/// Half of a length, but something.
fn half(length: u64) -> u64 {
    (length / 2).max(1)
}
