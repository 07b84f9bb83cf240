//! The manual's table of settings is the one that the code generates.

use std::fs;
use std::path::Path;

const BEGIN: &str = "<!-- generated: config -->\n";
const END: &str = "<!-- end: config -->";

#[test]
fn the_manual_lists_every_setting() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let text = fs::read_to_string(&path).expect("the manual");
    let (before, rest) = text.split_once(BEGIN).expect("the table's beginning");
    let (table, after) = rest.split_once(END).expect("the table's end");
    let generated = ncclx_rs::config::manual();
    if std::env::var_os("NCCLX_RS_UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{generated}{END}{after}")).expect("the manual, written");
    } else {
        assert!(table == generated, "docs/configuration.md is stale; run NCCLX_RS_UPDATE_DOCS=1 cargo test manual");
    }
}
