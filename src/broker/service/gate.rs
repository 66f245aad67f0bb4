//! Who may speak at all: a caller is known, and the service is its own, before a byte of its message is read.
//!
//! Knows headers and paths. Must not know what is asked; each call looks for itself whose it is.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::service::Routes;

use super::identify::Caller;
use super::{Broker, denied};
use crate::bound::Unknown;
use crate::wire::v1::{control_server, episodes_server, judges_server};

/// The services, behind the question who calls. What is found goes with the request, as an extension.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    routes: Routes,
    broker: Arc<Broker>,
}

impl Gate {
    pub(super) const fn new(routes: Routes, broker: Arc<Broker>) -> Self {
        Self { routes, broker }
    }
}

impl Service<http::Request<Body>> for Gate {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.routes, context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // The one that is ready answers; its copy waits for the next request.
        let next = self.routes.clone();
        let mut routes = std::mem::replace(&mut self.routes, next);
        let broker = Arc::clone(&self.broker);
        Box::pin(async move {
            match broker.known(request.headers(), request.uri().path()).await {
                Ok(caller) => {
                    request.extensions_mut().insert(caller);
                    routes.call(request).await
                }
                Err(status) => Ok(status.into_http()),
            }
        })
    }
}

impl Broker {
    /// Who calls, if the service that is called is its own.
    async fn known(&self, headers: &http::HeaderMap, path: &str) -> Result<Caller, Status> {
        let header = headers.get(http::header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let token = header.and_then(|h| h.strip_prefix("Bearer ")).map(str::trim).filter(|t| !t.is_empty());
        let token = token.ok_or_else(|| {
            Status::unauthenticated("there is no token: send `authorization: Bearer <token>` with every call")
        })?;
        let caller = self.identify.identify(token).await.map_err(|unknown| match unknown {
            Unknown::Refused(why) => Status::unauthenticated(why),
            Unknown::Unavailable(why) => Status::unavailable(why),
        })?;
        may_call(&caller, path)?;
        Ok(caller)
    }
}

/// Refuses a service that is another's. What is nobody's is refused by the services themselves.
fn may_call(caller: &Caller, path: &str) -> Result<(), Status> {
    let service = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    let (whose, its) = match service {
        episodes_server::SERVICE_NAME => ("agents", matches!(caller, Caller::Agent(_))),
        judges_server::SERVICE_NAME => ("judges", matches!(caller, Caller::Judge { .. })),
        control_server::SERVICE_NAME => ("the operator", *caller == Caller::Operator),
        _ => return Ok(()),
    };
    if its { Ok(()) } else { Err(denied(caller, whose)) }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn each_role_may_call_its_own_service_alone() {
        let judge = Caller::Judge { pod: "judge".into(), pod_uid: "u".into() };
        assert!(may_call(&judge, "/kernelfleet.v1.Judges/Pull").is_ok());
        for path in ["/kernelfleet.v1.Control/PutJob", "/kernelfleet.v1.Episodes/Append"] {
            assert_eq!(may_call(&judge, path).unwrap_err().code(), Code::PermissionDenied);
        }
        assert!(may_call(&Caller::Operator, "/kernelfleet.v1.Control/PutJob").is_ok());
        assert!(may_call(&Caller::Operator, "/kernelfleet.v1.Judges/Pull").is_err());
    }
}
