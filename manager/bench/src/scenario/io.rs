//! How fast bytes go to a guest's disk and back, and out of it through its agent. The times are those
//! of whole commands.

use std::time::Instant;

use super::{Context, Found, Restored, Rounds, Stock};
use crate::agent::Command;
use crate::contender::Vm;
use crate::error::Error;
use crate::model::Unit;

/// The file in the guest.
const FILE: &str = "/coppice-bench-io";

pub(super) struct Transfers {
    vm: Box<dyn Vm>,
    write: Command,
    forget: Command,
    read: Command,
    stream: Command,
}

impl Transfers {
    pub(super) fn new(context: &Context<'_>, stock: &mut Stock) -> Result<Self, Error> {
        let mib = context.workload.io_mib;
        let known = stock.known(context)?;
        let Restored { vm, .. } = context.restored(known.best())?;
        let root = |script: &str| Ok::<_, Error>(Command::shell(script)?.as_root());
        Ok(Self {
            vm,
            write: root(&format!(
                "rm -f {FILE}; dd if=/dev/zero of={FILE} bs=1M count={mib} conv=fsync 2>/dev/null"
            ))?,
            // Else it would be the guest's memory that is read.
            forget: root("sync; echo 3 > /proc/sys/vm/drop_caches")?,
            read: root(&format!("dd if={FILE} of=/dev/null bs=1M 2>/dev/null"))?,
            stream: Command::shell(&format!("head -c {} /dev/zero", u64::from(mib) << 20))?,
        })
    }

    /// Runs a command; gives MiB per second, and how many bytes came.
    fn rate(&self, command: &Command, mib: u32) -> Result<(f64, u64), Error> {
        let mut bytes = 0;
        let started = Instant::now();
        self.vm.run(command, &mut |piece| bytes += u64::try_from(piece.len()).unwrap_or(0))?;
        Ok((f64::from(mib) / started.elapsed().as_secs_f64(), bytes))
    }
}

impl Rounds for Transfers {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let mib = context.workload.io_mib;
        let mut push = |metric, rate| {
            found.push(Found::new(metric, Unit::MiBPerS, rate).with("io_mib", mib));
        };
        push("io_write_mib_per_s", self.rate(&self.write, mib)?.0);
        self.vm.run(&self.forget, &mut |_| ())?;
        push("io_read_mib_per_s", self.rate(&self.read, mib)?.0);
        let (rate, bytes) = self.rate(&self.stream, mib)?;
        if bytes != u64::from(mib) << 20 {
            return Err(Error::Missing(format!(
                "{bytes} bytes came out of the guest, not {mib} MiB"
            )));
        }
        push("io_stream_mib_per_s", rate);
        Ok(())
    }
}
