//! The built-in template: the `base` image, booted and checkpointed when it is first asked for.

use std::sync::Arc;
use std::time::Duration;

use super::lifecycle::labels;
use super::{Error, Fleet, blocking};
use crate::registry::{DEFAULT_TAG, Template, TemplateKind, now_ms};
use crate::sandbox::Config;
use crate::store::{GuestSettings, Id};
use crate::template::{self, Commands, Recipe};

/// Its name and ID.
pub(super) const BASE: &str = "base";
/// The kernel it is booted with.
const KERNEL: &str = "agent";
/// Its machine's memory in MiB and number of vCPUs: what E2B's own base has.
pub(super) const MEMORY_MIB: u32 = 512;
pub(super) const VCPUS: u8 = 2;
/// How long it may take to boot; emulated hosts are slow.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

impl Fleet {
    /// The built-in template, made now if it is not there or its checkpoint is not usable.
    pub(super) async fn base(self: &Arc<Self>) -> Result<Template, Error> {
        let _one_at_a_time = self.base.lock().await;
        let before = self.registry.public_template(BASE)?;
        match before.clone() {
            Some(template) if self.usable(&template.checkpoint).await => return Ok(template),
            _ => {}
        }
        let (store, config) = (self.store.clone(), self.base_config()?);
        tracing::info!("making the built-in template");
        let recipe = Recipe { config, commands: Commands::default(), labels: labels(BASE) };
        let checkpoint = blocking(move || async move { template::build(&store, &recipe).await });
        let template = Template {
            id: BASE.into(),
            tenant: None,
            kind: TemplateKind::Template,
            name: Some(BASE.into()),
            checkpoint: checkpoint.await.map_err(|error| Error::Template(Box::new(error)))?,
            sandbox: None,
            tags: vec![DEFAULT_TAG.into()],
            defaults: GuestSettings::default(),
            created_ms: now_ms(),
        };
        self.registry.put_template(&template)?;
        if let Some(before) = before {
            self.hide(&before.checkpoint).await;
        }
        Ok(template)
    }

    async fn usable(&self, checkpoint: &Id) -> bool {
        let (store, id) = (self.store.clone(), checkpoint.clone());
        blocking(move || async move { store.checkpoint(&id).is_ok() }).await
    }

    pub(super) fn base_config(&self) -> Result<Config, Error> {
        let home = &self.settings.home;
        Ok(Config {
            vmm: self.settings.vmm.clone(),
            kernel: home.kernel(KERNEL)?,
            image: home.image(BASE)?,
            memory_mib: MEMORY_MIB,
            vcpus: VCPUS,
            append: None,
            scratch: home.path().to_owned(),
            runtime: crate::workdir::base(),
            boot_timeout: BOOT_TIMEOUT,
        })
    }
}
