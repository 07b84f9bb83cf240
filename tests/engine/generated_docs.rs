//! The tables of docs/configuration.md are those that the code generates.

use std::fs;
use std::path::Path;

#[test]
fn the_documentation_lists_every_setting_and_launcher() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let text = fs::read_to_string(&path).expect("the manual");
    let tables = [("config", ncclx_rs::config::manual()), ("launchers", ncclx_rs::comm::launch::manual())];
    let updated = tables.iter().fold(text.clone(), |text, (name, table)| {
        let (begin, end) = (format!("<!-- generated: {name} -->\n"), format!("<!-- end: {name} -->"));
        let (before, rest) = text.split_once(&begin).expect("the table's beginning");
        let (_, after) = rest.split_once(&end).expect("the table's end");
        format!("{before}{begin}{table}{end}{after}")
    });
    if std::env::var_os("NCCLX_RS_UPDATE_DOCS").is_some() {
        fs::write(&path, updated).expect("the manual, written");
    } else {
        assert!(
            text == updated,
            "docs/configuration.md is stale; run NCCLX_RS_UPDATE_DOCS=1 cargo test generated_docs"
        );
    }
}
