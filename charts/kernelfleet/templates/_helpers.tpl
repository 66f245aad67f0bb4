{{- define "kernelfleet.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kernelfleet.selector" -}}
app.kubernetes.io/name: kernelfleet
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kernelfleet.labels" -}}
{{ include "kernelfleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kernelfleet.operator" -}}
kernelfleet-operator
{{- end }}
